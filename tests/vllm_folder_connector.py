"""A KV connector for vLLM that hands prompts from a prefill to a decode server through a folder, for tests.

Whole blocks go as they are, without a look inside: vLLM's layout on CPUs is its own business. vLLM imports this module
by `kv_connector_module_path`; nothing else does. kv_connector_extra_config: `path`.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1, KVConnectorMetadata, SupportsHMA

Block = tuple[str, int]  # its hash in hex, and where it is in the cache


@dataclass
class Step(KVConnectorMetadata):
    """What the worker loads before a step and saves in it."""

    loads: list[Block] = field(default_factory=list)
    saves: list[Block] = field(default_factory=list)


class FolderConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves prompts that come with do_remote_decode, loads those with do_remote_prefill, before the step and whole."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._folder = Path(extra["path"])
        self._folder.mkdir(parents=True, exist_ok=True)
        self._block_tokens = vllm_config.cache_config.block_size
        self._engine_id = self._kv_transfer_config.engine_id
        self._requests: dict[str, Any] = {}
        self._blocks: dict[str, list[int]] = {}
        self._loads: dict[str, tuple[int, int]] = {}  # [first, stop) of a prompt's blocks
        self._caches: dict[str, torch.Tensor] = {}

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        if not _asks(request, "do_remote_prefill"):
            return 0, False
        first = stop = num_computed_tokens // self._block_tokens
        most = min(len(request.block_hashes), (request.num_tokens - 1) // self._block_tokens)
        while stop < most and (self._folder / bytes(request.block_hashes[stop]).hex()).is_file():
            stop += 1
        self._loads[request.request_id] = (first, stop)
        return (stop - first) * self._block_tokens, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._requests[request.request_id] = request
        if not num_external_tokens:
            self._loads.pop(request.request_id, None)

    def build_connector_meta(self, scheduler_output: Any) -> Step:
        step = Step()
        for new in scheduler_output.scheduled_new_reqs:
            self._blocks[new.req_id] = list(new.block_ids[0])
            first, stop = self._loads.pop(new.req_id, (0, 0))
            step.loads += self._named(new.req_id, first, stop)
        going_on = scheduler_output.scheduled_cached_reqs
        for request_id, added in zip(going_on.req_ids, going_on.new_block_ids, strict=True):
            self._blocks[request_id] += added[0] if added else []
        for request_id, tokens in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[request_id]
            if _asks(request, "do_remote_decode"):
                whole = (request.num_computed_tokens + tokens) // self._block_tokens
                step.saves += self._named(request_id, 0, min(whole, len(request.block_hashes)))
        return step

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        self._requests.pop(request.request_id, None)
        self._blocks.pop(request.request_id, None)
        if not _asks(request, "do_remote_decode"):
            return False, None
        told = {"do_remote_prefill": True, "do_remote_decode": False, "remote_engine_id": self._engine_id}
        return False, told | {"remote_block_ids": list(block_ids[0]), "remote_host": "folder", "remote_port": 0}

    def request_finished(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def _named(self, request_id: str, first: int, stop: int) -> list[Block]:
        hashes, places = self._requests[request_id].block_hashes, self._blocks[request_id]
        return [(bytes(hashes[number]).hex(), places[number]) for number in range(first, stop)]

    # In the worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **_: Any) -> None:
        for name, place in self._get_connector_metadata().loads:
            layers = torch.load(self._folder / name)
            for layer, cache in self._caches.items():
                cache[place].copy_(layers[layer])

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **_: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        for name, place in self._get_connector_metadata().saves:
            file = self._folder / name
            if not file.is_file():
                torch.save({layer: cache[place].clone() for layer, cache in self._caches.items()}, file)


def _asks(request: Any, what: str) -> bool:
    return bool((request.kv_transfer_params or {}).get(what))
