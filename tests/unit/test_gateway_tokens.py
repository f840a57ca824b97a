"""A prompt's tokens from a tokenizer that lies beside the gateway."""

import asyncio
from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from server.gateway.asked import CHAT, COMPLETIONS, Asked
from server.gateway.asking import Asking
from server.gateway.settings import load
from server.gateway.tokens import Tokens, local_tokenizer
from server.gateway.upstream import Upstream

pytestmark = pytest.mark.engine
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'bad' %}{{ raise_exception('no') }}{% endif %}"
    "{{ m.role }} {{ m.content }} {% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    words = {"[UNK]": 0, "hello": 1, "world": 2, "user": 3, "[BOS]": 4}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.post_processor = tokenizers.processors.TemplateProcessing("[BOS] $A", special_tokens=[("[BOS]", 4)])
    path = tmp_path_factory.mktemp("tokenizer")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made, chat_template=TEMPLATE).save_pretrained(path)
    return path


def tokens_of(folder: Path, path: str, **body: object) -> tuple[list[int] | None, int]:
    async def found() -> tuple[list[int] | None, int]:
        settings = load(None, {}, [f"--gateway.tokenizer={folder}"]).gateway
        local = local_tokenizer(settings.tokenizer)
        upstream = Upstream()
        tokens = Tokens(upstream, settings, Asking(upstream, settings, asyncio.get_running_loop().time), local)
        wanted = Asked(id="r", path=path, body={"model": "m", **body}, tenant="default")
        try:
            return await tokens.of(wanted), tokens.missed
        finally:
            tokens.close()
            await upstream.close()

    return asyncio.run(found())


def test_texts_and_chats_have_their_tokens(folder):
    assert tokens_of(folder, COMPLETIONS, prompt="hello world") == ([4, 1, 2], 0)
    assert tokens_of(folder, COMPLETIONS, prompt=["hello", "world"]) == ([4, 1], 0)
    assert tokens_of(folder, CHAT, messages=[{"role": "user", "content": "world"}]) == ([3, 2], 0)


def test_special_tokens_are_there_where_the_request_says_so(folder):
    assert tokens_of(folder, COMPLETIONS, prompt="hello world", add_special_tokens=False) == ([1, 2], 0)
    chat = [{"role": "user", "content": "world"}]
    assert tokens_of(folder, CHAT, messages=chat, add_special_tokens=True) == ([4, 3, 2], 0)


def test_a_template_that_refuses_costs_the_tokens_and_not_the_request(folder):
    assert tokens_of(folder, CHAT, messages=[{"role": "bad", "content": "world"}]) == (None, 1)
    assert tokens_of(folder, CHAT, messages=[3]) == (None, 1)


@pytest.mark.parametrize("prompt", [[-1], [2**32], [1, "x"]])
def test_what_are_no_tokens_are_not_taken_for_some(folder, prompt):
    assert tokens_of(folder, COMPLETIONS, prompt=prompt) == (None, 1)


def test_a_tokenizer_that_is_not_there_is_said_at_start(tmp_path):
    with pytest.raises(ConfigError, match="tokenizer"):
        tokens_of(tmp_path, COMPLETIONS, prompt="x")
