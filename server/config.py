"""The settings of a node: one frozen tree, checked as a whole."""

import re
from collections.abc import Iterator, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from kvstore.errors import ConfigError
from server.sources import Given, build, collect, describe, show, walk

SOCKET_PATH_BYTES: Final = 107  # sockaddr_un holds 108, the last of them zero
PAGE_BYTES: Final = 4096
HUGE_PAGE_BYTES: Final = 2 << 20
LEAST_FRAME_BYTES: Final = 64 << 10
CLUSTER_FRAME_BYTES: Final = 256 << 10
LEAST_DISK_SLABS: Final = 4
TOKEN_CHARACTERS: Final = 16
YEAR_S: Final = 365 * 86_400

SIZES: Final = {"TiB": 1 << 40, "GiB": 1 << 30, "MiB": 1 << 20, "KiB": 1 << 10, "B": 1}
DURATIONS: Final[dict[str, int | Decimal]] = {"h": 3600, "m": 60, "s": 1, "ms": Decimal("0.001")}
PORT: Final = r"(\d{1,4}|[1-5]\d{4}|6[0-4]\d{3}|65[0-4]\d{2}|655[0-2]\d|6553[0-5])"
HOST_PORT: Final = rf"(\[[0-9A-Fa-f:.]+\]|[^:\s\[\]]+):{PORT}"

A_SIZE: Final = {"expected": "a size like 64MiB", "units": SIZES}
A_DURATION: Final = {"expected": "a duration like 30s", "units": DURATIONS}
A_TIMEOUT: Final = {"expected": "a duration above 0, like 30s", "units": DURATIONS}
A_SECRET: Final = {"expected": "printable ASCII without spaces", "secret": True}

Bytes = Annotated[int, Meta(ge=0, le=1 << 50, extra=A_SIZE)]
Seconds = Annotated[float, Meta(ge=0, le=YEAR_S, extra=A_DURATION)]
Timeout = Annotated[float, Meta(gt=0, le=YEAR_S, extra=A_TIMEOUT)]
Count = Annotated[int, Meta(ge=1, le=1 << 30, extra={"expected": "a whole number from 1 to 2^30"})]
Entries = Annotated[int, Meta(ge=0, le=1 << 30, extra={"expected": "a whole number from 0 to 2^30"})]
Threads = Annotated[int, Meta(ge=1, le=64, extra={"expected": "a whole number from 1 to 64"})]
Rate = Annotated[float, Meta(ge=0, le=1e9, extra={"expected": "a number, 0 or more"})]
Share = Annotated[float, Meta(gt=0, le=1, extra={"expected": "a number above 0 and at most 1"})]
Name = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}\Z",
        extra={"expected": "1 to 64 of A-Z a-z 0-9 _ . - that do not begin with . or -"},
    ),
]
Listen = Annotated[str, Meta(pattern=rf"^({HOST_PORT})?\Z", extra={"expected": "host:port, or nothing"})]
Devices = Annotated[
    str,
    Meta(
        pattern=r"^[A-Za-z0-9_.-]+(:\d{1,3})?(,[A-Za-z0-9_.-]+(:\d{1,3})?)*\Z",
        extra={"expected": "auto, off, or names of RDMA devices with commas between"},
    ),
]
Coordinators = Annotated[
    str,
    Meta(
        pattern=rf"^(etcd://{HOST_PORT}(,{HOST_PORT})*(/[A-Za-z0-9_.-]+)*)?\Z",
        extra={"expected": "etcd://host:port,host:port/prefix, or nothing"},
    ),
]
LABEL: Final = r"[a-z]{1,16}=[A-Za-z0-9_.-]{1,64}"
Labels = Annotated[str, Meta(pattern=rf"^({LABEL}(,{LABEL})*)?\Z", extra={"expected": "zone=a,rack=3, or nothing"})]
Topic = Annotated[str, Meta(pattern=r"^[!-~]{0,128}\Z", extra={"expected": "up to 128 printable ASCII characters"})]
Mode = Annotated[str, Meta(pattern=r"^0?[0-7]{3}\Z", extra={"expected": "an octal mode like 0600"})]
Secret = Annotated[str, Meta(pattern=r"^[!-~]*\Z", extra=A_SECRET)]
Wish = Literal["no", "try", "require"]


class NodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The process and its sockets."""

    name: Name = "node"
    run_dir: str = ""  # "": from XDG_RUNTIME_DIR or HOME
    unix_socket: str = ""  # "": <run_dir>/<name>.sock
    unix_mode: Mode = "0600"
    unix_tenant: str = "default"  # "": a token is needed there too
    tcp_listen: Listen = "127.0.0.1:7401"  # "": off
    tls_cert: str = ""
    tls_key: str = ""
    drain_seconds: Seconds = 10.0


class DramSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier in this host's memory."""

    capacity: Bytes = 1 << 30
    slab: Bytes = 64 << 20
    high_watermark: Share = 0.95
    low_watermark: Share = 0.85
    policy: Literal["lru", "clock", "s3fifo", "adaptive"] = "lru"
    mlock: Wish = "try"
    huge_pages: Wish = "try"
    prefault: bool = True


class HbmSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier in the memory of a GPU. Its slabs have the size of DRAM's, so that each block of DRAM fits."""

    device: str = ""  # "cuda:0", or "cpu" for tests; "": there is none
    capacity: Bytes = 4 << 30


class NvmeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier on a local disk."""

    path: str = ""  # "": there is none
    capacity: Bytes = 32 << 30
    slab: Bytes = 256 << 20
    high_watermark: Share = 0.75
    low_watermark: Share = 0.70
    io: Literal["auto", "posix", "kvikio"] = "auto"
    threads: Threads = 8
    admission: Literal["second_hit", "all"] = "second_hit"
    write: Literal["back", "through"] = "back"
    write_budget: Bytes = 0  # per day; 0: no limit


class ObjectSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The tier in object storage, which nodes share."""

    url: str = ""  # "": there is none
    options: Secret = ""  # of obstore, like endpoint=http://minio:9000,access_key_id=...
    capacity: Bytes = 0  # 0: no limit
    pack: Bytes = 64 << 20
    codec: Literal["none", "lz4", "zstd"] = "none"
    write: Literal["back", "through"] = "back"


class TierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What blocks are kept in."""

    dram: DramSettings = DramSettings()
    hbm: HbmSettings = HbmSettings()
    nvme: NvmeSettings = NvmeSettings()
    object: ObjectSettings = ObjectSettings()


class IndexSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The published index of each tenant."""

    entries: Entries = 0  # 0: from the tier's capacity


class CopierSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The threads that move bytes."""

    threads: Threads = 2


class LimitSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What one client or tenant may ask for."""

    connections: Count = 256
    frame_bytes: Bytes = 16 << 20
    batch_blocks: Count = 16_384
    inflight_bytes: Bytes = 1 << 30
    leases_per_client: Count = 4096
    lease_max: Timeout = 600.0
    put_timeout: Timeout = 30.0
    wait_max: Seconds = 60.0
    namespaces_per_tenant: Count = 256
    explain_history: Entries = 65_536
    pins_per_tenant: Entries = 100_000


class RestSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP interface."""

    listen: Listen = "127.0.0.1:7400"  # "": off
    body_bytes: Bytes = 256 << 20
    requests_per_second: Rate = 0.0  # of each tenant; 0: no limit
    request_timeout: Timeout = 30.0


class TenantSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may use the node, and how much of it."""

    name: Name
    token: Secret
    read_token: Secret = ""  # "": none
    secret: Secret = ""
    quota: Bytes = 0  # 0: no limit
    may_write: bool = True
    admin: bool = False

    def __repr__(self) -> str:
        return f"TenantSettings(name={self.name!r})"  # token and secret must not reach a log


class RdmaSettings(msgspec.Struct, frozen=True, kw_only=True):
    """One-sided READs, for clients that come over TCP first."""

    devices: Devices = "auto"  # names with commas between, as mlx5_0 or mlx5_0:1; auto: all; off
    queue_pairs: Threads = 2  # of each path between two ports
    slice: Bytes = 1 << 20  # larger blocks are read in pieces
    peers: Count = 256  # connections that have queue pairs; idle ones make way
    quarantine: Bytes = 256 << 20  # of one connection, in memory that a NIC may still write though nobody waits


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Many nodes as one pool."""

    coordinator: Coordinators = ""  # etcd://host:port,host:port/prefix; "": this node is alone
    token: Secret = ""  # what the nodes know each other by
    advertise: Listen = ""  # where others reach node.tcp_listen; "": there
    labels: Labels = ""  # where the node is: zone=a,rack=3
    ca_file: str = ""  # of other nodes' certificates; "": the system's
    transport: Literal["auto", "tcp", "rdma"] = "auto"
    copies: Share = 0.1  # of DRAM, for copies of other nodes' blocks: over it they go first
    hot_copies: Threads = 4  # of a hot stripe, at most
    hot_rate: Rate = 2000.0  # blocks per second that one holder serves of a stripe before there is one more


class EventSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What subscribers are told."""

    buffer: Count = 65_536  # events that are kept for who falls behind
    zmq: Listen = ""  # "": off; replays at the port after
    topic: Topic = "kv"


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the node writes to stderr."""

    level: Literal["debug", "info", "warning", "error"] = "info"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything that can be set. Sizes are in bytes and durations in seconds."""

    node: NodeSettings = NodeSettings()
    tiers: TierSettings = TierSettings()
    index: IndexSettings = IndexSettings()
    copier: CopierSettings = CopierSettings()
    limits: LimitSettings = LimitSettings()
    rest: RestSettings = RestSettings()
    rdma: RdmaSettings = RdmaSettings()
    cluster: ClusterSettings = ClusterSettings()
    events: EventSettings = EventSettings()
    tenants: tuple[TenantSettings, ...] = ()
    log: LogSettings = LogSettings()


class Setting(NamedTuple):
    """One value for people: `value` has units and hides secrets, `origin` says which source it is from."""

    name: str
    value: str
    origin: str


def load(path: Path | None, environ: Mapping[str, str], options: Sequence[str]) -> Config:
    """The checked settings of all sources (see `server.sources`), paths filled in. Raises ConfigError.

    options: words of a command line, "--log.level=debug" or "--log.level", "debug".
    """
    return _resolve(path, environ, options)[0]


def origins(path: Path | None, environ: Mapping[str, str], options: Sequence[str]) -> list[Setting]:
    """Each setting of `load` with its source, in the tree's order. Raises ConfigError."""
    config, given = _resolve(path, environ, options)
    return [Setting(name, show(value, hint), _origin(given, name)) for name, hint, value in walk(config)]


def defaults() -> dict[str, str]:
    """Every setting and its default, for people; those of a tenant are named like `tenants.*.token`."""
    return {name: show(default, hint) for name, hint, default in describe(Config)}


def host_port(listen: str) -> tuple[str, int]:
    """("127.0.0.1", 7401) of "127.0.0.1:7401", ("::1", 7401) of "[::1]:7401". Raises ValueError."""
    match = re.fullmatch(HOST_PORT, listen)
    if not match:
        raise ValueError(f"expected host:port, not {listen!r}")
    return match[1].strip("[]"), int(match[2])


def coordinators(url: str) -> tuple[list[tuple[str, int]], str]:
    """([("10.0.0.1", 2379)], "/cairn") of "etcd://10.0.0.1:2379/cairn"."""
    hosts, _, prefix = url.removeprefix("etcd://").partition("/")
    return [host_port(host) for host in hosts.split(",")], f"/{prefix or 'cairn'}"


def labels(text: str) -> dict[str, str]:
    """{"zone": "a"} of "zone=a"."""
    return dict(pair.split("=", 1) for pair in text.split(",")) if text else {}


def _resolve(path: Path | None, environ: Mapping[str, str], options: Sequence[str]) -> tuple[Config, dict[str, Given]]:
    given = collect(Config, path, environ, options)
    config = _with_paths(build(Config, given), environ)
    for rule, names in _contradictions(config):
        shown = {name: show(value, hint) or "empty" for name, hint, value in walk(config)}
        facts = ", ".join(f"{name} is {shown[name]} ({_origin(given, name)})" for name in names)
        raise ConfigError(f"{rule}: {facts}")
    return config, given


def _origin(given: Mapping[str, Given], name: str) -> str:
    return given[name].origin if name in given else "default"


def _with_paths(config: Config, environ: Mapping[str, str]) -> Config:
    node, run_dir = config.node, config.node.run_dir
    if not run_dir and environ.get("XDG_RUNTIME_DIR"):
        run_dir = f"{environ['XDG_RUNTIME_DIR']}/cairn"
    elif not run_dir and environ.get("HOME"):
        run_dir = f"{environ['HOME']}/.cairn"
    elif not run_dir:
        raise ConfigError("node.run_dir must be set where XDG_RUNTIME_DIR and HOME are not")
    unix_socket = node.unix_socket or f"{run_dir}/{node.name}.sock"
    return msgspec.structs.replace(config, node=msgspec.structs.replace(node, run_dir=run_dir, unix_socket=unix_socket))


def _contradictions(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The rules that settings break together, each with the settings' names."""
    node, dram, limits = config.node, config.tiers.dram, config.limits
    if dram.low_watermark >= dram.high_watermark:
        names = ("tiers.dram.low_watermark", "tiers.dram.high_watermark")
        yield "the low watermark must be below the high one", names
    if not dram.slab or dram.slab % PAGE_BYTES:
        yield "a slab must be a multiple of 4KiB", ("tiers.dram.slab",)
    if dram.huge_pages == "require" and dram.slab % HUGE_PAGE_BYTES:
        names = ("tiers.dram.slab", "tiers.dram.huge_pages")
        yield "with huge pages a slab must be a multiple of 2MiB", names
    if dram.slab > dram.capacity:
        yield "a slab must fit into the tier", ("tiers.dram.slab", "tiers.dram.capacity")
    if config.tiers.hbm.device and dram.slab > config.tiers.hbm.capacity:
        yield "a slab must fit into the tier", ("tiers.dram.slab", "tiers.hbm.capacity")
    yield from _nvme_contradictions(config.tiers.nvme)
    if limits.frame_bytes < LEAST_FRAME_BYTES:
        yield "a frame must have room for 64KiB", ("limits.frame_bytes",)
    if limits.inflight_bytes < limits.frame_bytes:
        names = ("limits.frame_bytes", "limits.inflight_bytes")
        yield "a frame must fit into what may be in flight", names
    if not config.rest.body_bytes:
        yield "a body must have room for a byte", ("rest.body_bytes",)
    if bool(node.tls_cert) != bool(node.tls_key):
        yield "TLS needs both a certificate and its key", ("node.tls_cert", "node.tls_key")
    if len(node.unix_socket.encode()) > SOCKET_PATH_BYTES:
        yield f"a socket's path may have at most {SOCKET_PATH_BYTES} bytes", ("node.unix_socket",)
    yield from _cluster_contradictions(config)
    yield from _tenant_contradictions(config)


def _nvme_contradictions(nvme: NvmeSettings) -> Iterator[tuple[str, tuple[str, ...]]]:
    if nvme.low_watermark >= nvme.high_watermark:
        names = ("tiers.nvme.low_watermark", "tiers.nvme.high_watermark")
        yield "the low watermark must be below the high one", names
    if not nvme.slab or nvme.slab % PAGE_BYTES:
        yield "a slab must be a multiple of 4KiB", ("tiers.nvme.slab",)
    if nvme.path and nvme.slab * LEAST_DISK_SLABS > nvme.capacity:
        rule = f"the tier must have room for {LEAST_DISK_SLABS} slabs, or none is spare at the watermark"
        yield rule, ("tiers.nvme.slab", "tiers.nvme.capacity")


def _cluster_contradictions(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    cluster, node = config.cluster, config.node
    if not cluster.coordinator:
        return
    if len(cluster.token) < TOKEN_CHARACTERS:
        yield f"a cluster needs a token of at least {TOKEN_CHARACTERS} characters", ("cluster.token",)
    if any(cluster.token in (tenant.token, tenant.read_token) for tenant in config.tenants):
        yield "a tenant may not have the cluster's token", ("cluster.token",)
    if config.limits.frame_bytes < CLUSTER_FRAME_BYTES:
        yield "what nodes tell each other takes a frame of 256KiB", ("limits.frame_bytes",)
    if not node.tcp_listen:
        yield "other nodes come by TCP", ("node.tcp_listen", "cluster.coordinator")
    elif not cluster.advertise and host_port(node.tcp_listen)[0] in ("0.0.0.0", "::"):
        yield "other nodes need an address to come to: cluster.advertise", ("node.tcp_listen", "cluster.advertise")


def _tenant_contradictions(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    first: dict[tuple[str, str], int] = {}
    for number, tenant in enumerate(config.tenants):
        name = f"tenants.{number}.name"
        if any(0 < len(token) < TOKEN_CHARACTERS for token in (tenant.token or " ", tenant.read_token)):
            yield f"a token must have at least {TOKEN_CHARACTERS} characters", (name,)
        if tenant.token == tenant.read_token:
            yield "a token that may only read must be another than the one that may write", (name,)
        for field, value in (("name", tenant.name), ("token", tenant.token), ("token", tenant.read_token)):
            other = first.setdefault((field, value), number) if value else number
            if other != number:
                yield f"two tenants may not share a {field}", (f"tenants.{other}.name", name)
    names = [tenant.name for tenant in config.tenants]
    if names and config.node.unix_tenant and config.node.unix_tenant not in names:
        yield f"the Unix socket's tenant must be one of {', '.join(names)}, or none", ("node.unix_tenant",)
