"""Runs in LMCache's environment: does with LMCache's own classes what a test asks for, one line of JSON each way.

A request is ``[method, arguments]``, an answer ``["value", value]`` or ``["error", class name, text]``. Bytes travel as
hex. Not a test module, and not importable where torch and lmcache are not installed.
"""

from __future__ import annotations

import json
import os
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch
import zmq
from lmcache.utils import EngineType
from lmcache.v1.multiprocess.custom_types import (
    IPCCacheServerKey,
    get_customized_decoder,
    get_customized_encoder,
)
from lmcache.v1.multiprocess.group_view import EngineGroupInfo
from lmcache.v1.multiprocess.transfer_context import create_transfer_context
from lmcache.v1.multiprocess.transport.factory import RequestClientFactory
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper
from lmcache.v1.platform.devices.cpu.shm import migrate_to_shm_and_wrap

TIMEOUT_S = 20.0


@dataclass
class Engine:
    """An engine as vLLM's connector would have it: tensors, a client, and the way their blocks are transferred."""

    tensors: dict[str, Any]
    client: Any
    context: Any
    transfers: Any
    model_name: str
    blocks_in_chunk: int


class Peer:
    """What can be asked for. Tensors and engines are named by the numbers that these methods give."""

    def __init__(self) -> None:
        self.tensors: dict[int, Any] = {}
        self.engines: dict[int, Engine] = {}
        self.num_made = 0

    def _keep(self, tensor: Any) -> int:
        self.num_made += 1
        self.tensors[self.num_made] = tensor
        return self.num_made

    # Descriptors

    def version(self) -> str:
        """Of LMCache."""
        from importlib.metadata import version

        return version("lmcache")

    def make(self, dtype: str, shape: list[int], axes: list[int] | None = None) -> int:
        """A tensor of zeros in private memory, its axes permuted."""
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype))
        return self._keep(tensor if axes is None else tensor.permute(axes))

    def share(self, tensor: int) -> str:
        """Move a tensor into a segment of LMCache's; its descriptor."""
        return str(DeviceIPCWrapper.Serialize(migrate_to_shm_and_wrap(self.tensors[tensor])).hex())

    def map(self, descriptor: str) -> dict[str, Any]:
        """Map what a descriptor describes."""
        wrapper = DeviceIPCWrapper.Deserialize(bytes.fromhex(descriptor))
        tensor = wrapper.to_tensor()
        return {
            "tensor": self._keep(tensor),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "shape": list(tensor.shape),
            "stride": list(tensor.stride()),
            "storage_offset": tensor.storage_offset(),
            "again": DeviceIPCWrapper.Serialize(wrapper).hex(),
        }

    def map_frame(self, frame: str) -> dict[str, Any]:
        """Decode a whole frame of the protocol, a list of descriptors; what LMCache makes of the list again."""
        wrappers = get_customized_decoder(list[DeviceIPCWrapper]).decode(bytes.fromhex(frame))
        return {
            "tensors": [self._keep(wrapper.to_tensor()) for wrapper in wrappers],
            "again": get_customized_encoder(list[DeviceIPCWrapper]).encode(wrappers).hex(),
        }

    def frame(self, tensors: list[int]) -> str:
        """The frame of some tensors' descriptors."""
        wrappers = [migrate_to_shm_and_wrap(self.tensors[tensor]) for tensor in tensors]
        return str(get_customized_encoder(list[DeviceIPCWrapper]).encode(wrappers).hex())

    def layout(self, tensor: int) -> dict[str, Any]:
        """Shape and strides of a tensor as it is now."""
        return {"shape": list(self.tensors[tensor].shape), "stride": list(self.tensors[tensor].stride())}

    def read(self, tensor: int) -> str:
        """A tensor's elements in the order of its axes, as bytes."""
        flat = self.tensors[tensor].contiguous().reshape(-1)
        return bytes(flat.view(torch.uint8).numpy()).hex() if flat.numel() else ""

    def write(self, tensor: int, data: str) -> None:
        """Set all elements of a tensor."""
        target = self.tensors[tensor]
        if target.numel():
            target.copy_(torch.frombuffer(bytearray.fromhex(data), dtype=target.dtype).reshape(target.shape))

    def drop(self, tensors: list[int]) -> None:
        """Forget tensors; their memory goes with them."""
        for tensor in tensors:
            del self.tensors[tensor]

    # Engines

    def register(
        self,
        url: str,
        mode: str,
        model_name: str,
        tensors: list[int],
        kv_layout: str,
        groups: list[dict[str, Any]],
        blocks_in_chunk: int,
        instance_id: int,
    ) -> int:
        """Register tensors, one a layer, with a server."""
        caches = {f"layer.{index}": self.tensors[tensor] for index, tensor in enumerate(tensors)}
        context = zmq.Context()
        client = RequestClientFactory.create(url, context=context)
        transfers = create_transfer_context(caches, mode=mode, instance_id=instance_id, req_client=client)
        transfers.register(
            caches,
            model_name,
            1,
            blocks_in_chunk,
            TIMEOUT_S,
            layout_hints={"kv_layout": kv_layout},
            engine_group_infos=[
                EngineGroupInfo(**{**group, "layer_indices": tuple(group["layer_indices"])}) for group in groups
            ],
            engine_type=EngineType.VLLM,
        )
        self.num_made += 1
        self.engines[self.num_made] = Engine(caches, client, context, transfers, model_name, blocks_in_chunk)
        return self.num_made

    def _key(self, engine: Engine, tokens: list[int], request_id: str, worker_id: int | None) -> Any:
        return IPCCacheServerKey(
            model_name=engine.model_name,
            world_size=1,
            worker_id=worker_id,
            token_ids=tuple(tokens),
            start=0,
            end=len(tokens),
            request_id=request_id,
            cache_salt="",
            num_kv_readers=1,
        )

    def store(self, engine: int, tokens: list[int], block_ids: list[list[int]], request_id: str) -> bool:
        """Store whole chunks."""
        of = self.engines[engine]
        key = self._key(of, tokens, request_id, 0)
        event = of.transfers.create_recorded_event()
        future = of.transfers.submit_store(request_id, key, of.tensors, block_ids, event, of.blocks_in_chunk)
        return bool(future.result(TIMEOUT_S))

    def lookup(self, engine: int, tokens: list[int], request_id: str) -> int:
        """Chunks found."""
        of = self.engines[engine]
        of.client.lookup(self._key(of, tokens, request_id, None), 1).result(TIMEOUT_S)
        deadline = time.monotonic() + TIMEOUT_S
        while (found := of.client.query_prefetch_status(request_id).result(TIMEOUT_S)) is None:
            if time.monotonic() > deadline:
                raise TimeoutError(f"lookup {request_id} did not end")
            time.sleep(0.005)
        return int(found)

    def retrieve(self, engine: int, tokens: list[int], block_ids: list[list[int]], request_id: str) -> bool:
        """Retrieve what the lookup of this request has found."""
        of = self.engines[engine]
        key = self._key(of, tokens, request_id, 0)
        event = of.transfers.create_recorded_event()
        future = of.transfers.submit_retrieve(request_id, key, of.tensors, block_ids, event, of.blocks_in_chunk)
        done = bool(future.result(TIMEOUT_S))
        of.client.end_session(request_id).result(TIMEOUT_S)
        return done

    def unregister(self, engine: int) -> None:
        """Unregister and disconnect."""
        of = self.engines.pop(engine)
        future = of.transfers.unregister()
        if future is not None:
            future.result(TIMEOUT_S)
        of.transfers.close()
        of.client.close()
        of.context.destroy(linger=0)


def main() -> None:
    """Answer until the end of the input."""
    # LMCache logs to standard output: answers go to the descriptor that was it, logs to standard error.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    peer = Peer()
    for line in sys.stdin:
        method, arguments = json.loads(line)
        try:
            answer: list[Any] = ["value", getattr(peer, method)(**arguments)]
        except Exception as error:
            answer = ["error", type(error).__name__, str(error)]
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
