"""Another process at the same pages: python examples/reader.py /tmp/cache.kv"""

import sys
from pathlib import Path

import numpy as np

import kvshm
from kvshm import transfer, wire

wrappers = wire.unpack(Path(sys.argv[1]).read_bytes())
context = kvshm.CPUCacheContext(wrappers, lmcache_tokens_per_chunk=16, layout_hints={"kv_layout": "NHD"})
chunk = np.empty(transfer.object_group_nbytes(context, 0), dtype=np.uint8)
transfer.gather_chunks(context, [[5]], [chunk])  # block 5 of every layer, packed into one object
transfer.scatter_chunks(context, [[9]], [chunk])  # the same tokens into the engine's block 9
print(f"the reader copied {chunk.nbytes} bytes, {context.cache_size_per_token()} a token")
