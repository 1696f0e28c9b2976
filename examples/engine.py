"""An engine whose KV cache is in shared memory: python examples/engine.py /tmp/cache.kv"""

import sys
from pathlib import Path

import kvshm
from kvshm import wire

path = Path(sys.argv[1])
layers = kvshm.empty_many([(2, 64, 16, 4, 32)] * 3, ["bfloat16"] * 3)  # per layer: K and V, blocks, tokens, heads
for number, layer in enumerate(layers):
    layer[:, 5] = number + 0.5  # what the engine computed for the 16 tokens of block 5
path.write_bytes(wire.pack([kvshm.wrap(layer) for layer in layers]))  # descriptors, a few hundred bytes
input(f"run: python examples/reader.py {path}   then press Enter here\n")
print("the engine finds in block 9:", [float(layer[0, 9, 0, 0, 0]) for layer in layers])
path.unlink()
