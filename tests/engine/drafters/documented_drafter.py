"""A drafter as TensorRT-LLM's guide describes one; nothing in it knows of this project."""

from tensorrt_llm._torch.pyexecutor.resource_manager import BaseResourceManager
from tensorrt_llm._torch.speculative.drafter import Drafter
from tensorrt_llm.llmapi import UserProvidedDecodingConfig


class PoolManager(BaseResourceManager):
    """A pool of what followed each token, per request."""

    def __init__(self):
        self.pools = {}
        self.told = []

    def prepare_resources(self, scheduled_batch):
        self.told.append("prepare")
        for request in scheduled_batch.generation_requests:
            tokens = request.get_tokens(0)
            self.pools[request.request_id] = dict(zip(tokens, tokens[1:], strict=False))

    def update_resources(self, scheduled_batch):
        self.told.append("update")

    def free_resources(self, request):
        self.told.append("free")
        self.pools.pop(request.request_id)


class MyDrafter(Drafter):
    """Follows the pool from the last token."""

    def prepare_draft_tokens(self, scheduled_requests, resource_manager=None):
        for request in scheduled_requests.generation_requests:
            tokens = request.get_tokens(0)
            following = dict(zip(tokens, tokens[1:], strict=False))
            drafted: list[int] = []
            while len(drafted) < 3 and (drafted or tokens)[-1] in following:
                drafted.append(following[(drafted or tokens)[-1]])
            request.py_draft_tokens = drafted


speculative_config = UserProvidedDecodingConfig(
    max_draft_len=3, drafter=MyDrafter(), resource_manager=PoolManager()
)
