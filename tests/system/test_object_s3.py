"""The object tier on S3, as moto's server speaks it over HTTP: the same contract, and what only a server can do."""

import asyncio
import itertools
from collections.abc import Callable, Iterator

import boto3
import pytest
from moto.server import ThreadedMotoServer

from kvstore.tiers.bucket import Bucket
from kvstore.tiers.object_store import open_bucket
from tests.unit.test_object_store import ROOT, ObjectTierContract, blocks, content, copier, key, names, read

__all__ = ["copier"]  # a fixture of the contract

KEYS = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """The address of an S3 server."""
    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    yield f"http://{host}:{port}"
    moto.stop()


@pytest.fixture
def new_bucket(server: str) -> Callable[[], Bucket]:
    def make() -> Bucket:
        name = f"bucket-{next(NUMBERS)}"
        client = boto3.client(
            "s3", endpoint_url=server, aws_access_key_id="test", aws_secret_access_key="test", region_name="us-east-1"
        )
        client.create_bucket(Bucket=name)
        return open_bucket(f"s3://{name}/a/prefix", {**KEYS, "endpoint": server, "allow_http": "true"})

    return make


class TestS3(ObjectTierContract):
    @pytest.fixture
    def bucket(self, new_bucket: Callable[[], Bucket]) -> Bucket:
        return new_bucket()

    def test_a_namespace_of_more_packs_than_a_page_lists_is_learned_whole(self) -> None:
        async def scenario() -> None:
            here, there = self.tier("a"), self.tier("b")
            for start in range(0, 520, 20):  # 1,040 objects; a page has 1,000
                await asyncio.gather(*(here.write(ROOT, blocks(start + number, size=10)) for number in range(20)))
            assert len(await names(self.bucket)) == 1040
            await there.refresh(ROOT)
            assert all(there.has(ROOT, key(number)) for number in range(520))
            assert await read(there, 519, size=10) == [content(519, 10)]

        asyncio.run(scenario())


def test_a_bucket_that_does_not_exist_is_an_error_of_the_system(server: str) -> None:
    async def scenario() -> None:
        bucket = open_bucket("s3://nowhere", {**KEYS, "endpoint": server, "allow_http": "true"})
        with pytest.raises(OSError):
            await bucket.put("v1/name", memoryview(b"x"), part_bytes=0)

    asyncio.run(scenario())


def test_a_server_that_is_not_there_is_an_error_of_the_system() -> None:
    async def scenario() -> None:
        bucket = open_bucket("s3://nowhere", {**KEYS, "endpoint": "http://127.0.0.1:9", "allow_http": "true"})
        with pytest.raises(OSError):
            await bucket.get("v1/name", 0, 10)
        with pytest.raises(OSError):
            await names(bucket)

    asyncio.run(scenario())


class Canned:
    """A server that answers every request with the same bytes and hangs up; `asked` counts them."""

    def __init__(self, answer: bytes) -> None:
        self.answer, self.asked = answer, 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        self.asked += 1
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    async def get(self) -> memoryview:
        """What a bucket on this server answers to a get of 10 bytes."""
        async with await asyncio.start_server(self, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            options = {**KEYS, "endpoint": f"http://127.0.0.1:{port}", "allow_http": "true"}
            return await open_bucket("s3://bucket", options).get("v1/name", 0, 10)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        ("403 Forbidden", PermissionError),
        ("404 Not Found", FileNotFoundError),
        ("500 Internal Server Error", OSError),
        ("503 Slow Down", OSError),
    ],
)
def test_a_status_is_an_error_of_the_system_and_obstore_repeats_nothing(status: str, error: type[OSError]) -> None:
    server = Canned(f"HTTP/1.1 {status}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode())
    with pytest.raises(error):
        asyncio.run(server.get())
    assert server.asked == 1


def test_a_body_that_breaks_off_is_an_error_of_the_system() -> None:
    head = b"HTTP/1.1 206 Partial Content\r\nContent-Length: 10\r\nContent-Range: bytes 0-9/10\r\n"
    stamps = b'Last-Modified: Mon, 30 Nov 2026 00:00:00 GMT\r\nETag: "1"\r\nConnection: close\r\n\r\n'
    with pytest.raises(OSError):
        asyncio.run(Canned(head + stamps + b"01234").get())
    assert asyncio.run(Canned(head + stamps + b"0123456789").get()) == b"0123456789"


@pytest.mark.parametrize("answer", [b"", b"garbage\r\n\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc"])
def test_what_is_no_answer_is_an_error_of_the_system(answer: bytes) -> None:
    with pytest.raises(OSError):
        asyncio.run(Canned(answer).get())
