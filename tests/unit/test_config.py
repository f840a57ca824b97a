"""Settings from every source, what outweighs what, and what a bad one is told."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from server.config import Config, defaults, host_port, load, origins

HOME = {"HOME": "/home/someone"}
TOKEN = "t" * 16
TENANT = f'[[tenants]]\nname = "default"\ntoken = "{TOKEN}"\n'


@pytest.fixture
def toml(tmp_path):
    def write(text: str) -> Path:
        path = tmp_path / "node.toml"
        path.write_text(text)
        return path

    return write


def shown(path, environ, options) -> dict[str, tuple[str, str]]:
    return {name: (value, origin) for name, value, origin in origins(path, environ, options)}


def test_a_node_without_any_settings_listens_on_loopback_only():
    config = load(None, HOME, [])
    assert config.tiers.dram.capacity == 1 << 30
    assert config.node.tcp_listen == "127.0.0.1:7401"
    assert config.rest.listen == "127.0.0.1:7400"
    assert config.node.unix_mode == "0600"
    assert config.tenants == ()


def test_the_command_line_outweighs_the_environment_and_that_the_file(toml):
    path = toml('[limits]\nconnections = 1\nbatch_blocks = 2\nleases_per_client = 3\n[node]\nname = "x"\n')
    environ = HOME | {"CAIRN_LIMITS__CONNECTIONS": "10", "CAIRN_LIMITS__BATCH_BLOCKS": "20"}
    limits = load(path, environ, ["--limits.connections=100"]).limits
    assert (limits.connections, limits.batch_blocks, limits.leases_per_client) == (100, 20, 3)


def test_each_value_says_where_it_is_from(toml):
    path = toml('[tiers.dram]\ncapacity = "2GiB"\n')
    environ = HOME | {"CAIRN_LIMITS__LEASE_MAX": "250ms"}
    settings = shown(path, environ, ["--log.level", "debug"])
    assert settings["tiers.dram.capacity"] == ("2GiB", str(path))
    assert settings["limits.lease_max"] == ("250ms", "CAIRN_LIMITS__LEASE_MAX")
    assert settings["log.level"] == ("debug", "--log.level")
    assert settings["limits.wait_max"] == ("1m", "default")
    assert settings["node.unix_socket"] == ("/home/someone/.cairn/node.sock", "default")


def test_what_is_shown_can_be_given_again():
    settings = shown(None, HOME, ["--tiers.dram.capacity", "1.5GiB", "--limits.put_timeout", "90s"])
    again = load(None, HOME, [f"--{name}={value}" for name, (value, _) in settings.items()])
    assert again == load(None, HOME, ["--tiers.dram.capacity", "1.5GiB", "--limits.put_timeout", "90s"])


def test_there_are_at_most_80_settings():
    assert len(defaults()) <= 80


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("4096", 4096),
        ("64 MiB", 64 << 20),
        ("32GiB", 32 << 30),
        ("1.5KiB", 1536),
        ("1TiB", 1 << 40),
        ("9B", 9),
    ],
)
def test_a_size_has_a_unit_or_is_in_bytes(text, size, toml):
    assert load(None, HOME, ["--rest.body_bytes", text]).rest.body_bytes == size
    assert load(toml(f'[rest]\nbody_bytes = "{text}"\n'), HOME, []).rest.body_bytes == size


@pytest.mark.parametrize(
    ("text", "seconds"), [("5s", 5), ("250ms", 0.25), ("2", 2), ("1.5", 1.5), ("10m", 600), ("1 h", 3600)]
)
def test_a_duration_has_a_unit_or_is_in_seconds(text, seconds):
    assert load(None, HOME, ["--limits.put_timeout", text]).limits.put_timeout == seconds


def test_plain_numbers_in_the_file_are_bytes_and_seconds(toml):
    config = load(toml("[rest]\nbody_bytes = 4096\nrequest_timeout = 2.5\n[limits]\nwait_max = 3\n"), HOME, [])
    assert (config.rest.body_bytes, config.rest.request_timeout, config.limits.wait_max) == (4096, 2.5, 3.0)


@given(st.integers(1, 1 << 50))
def test_any_size_survives_being_shown(size):
    value = shown(None, HOME, [f"--rest.body_bytes={size}"])["rest.body_bytes"][0]
    assert load(None, HOME, [f"--rest.body_bytes={value}"]).rest.body_bytes == size


@given(st.integers(0, 10**9))
def test_any_duration_in_milliseconds_survives_being_shown(milliseconds):
    value = shown(None, HOME, [f"--limits.wait_max={milliseconds}ms"])["limits.wait_max"][0]
    assert load(None, HOME, [f"--limits.wait_max={value}"]).limits.wait_max == pytest.approx(milliseconds / 1000)


@pytest.mark.parametrize(("text", "value"), [("false", False), ("true", True), ("0", False), ("1", True)])
def test_a_switch_is_given_as_a_value(text, value):
    assert load(None, HOME, ["--tiers.dram.prefault", text]).tiers.dram.prefault is value


def test_an_empty_variable_turns_an_address_off():
    assert load(None, HOME | {"CAIRN_REST__LISTEN": ""}, []).rest.listen == ""


def test_the_last_of_two_options_counts():
    assert load(None, HOME, ["--log.level=debug", "--log.level", "error"]).log.level == "error"


def test_variables_that_are_no_settings_are_left_alone():
    environ = HOME | {"CAIRN_TOKEN": "x", "CAIRN_NODE_SERVICE_HOST": "10.0.0.1", "PATH": "/bin"}
    assert load(None, environ, []) == load(None, HOME, [])


# Unknown and bad


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tiers.dram.capcity=1"], "--tiers.dram.capcity: .*did you mean --tiers.dram.capacity?"),
        (["--dram.high_watermark=1"], "did you mean --tiers.dram.high_watermark?"),
        (["--capacity=1"], "did you mean --tiers.dram.capacity?"),
        (["--zzz=1"], "--zzz: there is no such setting$"),
        (["--tiers.dram=1"], "--tiers.dram: there is no such setting"),
        (["--log.level"], "--log.level: needs a value"),
        (["--log.level", "--node.name=x"], "--log.level: needs a value"),
        (["log.level=debug"], "log.level=debug: expected an option"),
        (
            ["--log.level=debgu"],
            "expected one of debug, info, warning, error, not 'debgu'; did you mean debug?",
        ),
        (["--tiers.dram.mlock=yes"], "expected one of no, try, require"),
        (["--tiers.dram.policy=arc"], "expected one of lru"),
        (["--tiers.dram.prefault=maybe"], "expected true or false, not 'maybe'"),
        (["--tiers.dram.capacity=32GB"], "--tiers.dram.capacity: expected a size like 64MiB, not '32GB'"),
        (["--tiers.dram.capacity=32gib"], "expected a size"),
        (["--tiers.dram.capacity=-1"], "expected a size"),
        (["--tiers.dram.capacity="], "expected a size"),
        (["--tiers.dram.capacity=1.5B"], "expected a size"),
        (["--tiers.dram.capacity=2000TiB"], "expected a size"),
        (["--tiers.dram.capacity=10s"], "expected a size"),
        (["--limits.put_timeout=0s"], "expected a duration above 0"),
        (["--limits.wait_max=5MiB"], "expected a duration"),
        (["--limits.wait_max=2w"], "expected a duration"),
        (["--limits.connections=0"], "expected a whole number from 1"),
        (["--limits.connections=1.5"], "expected a whole number from 1"),
        (["--copier.threads=65"], "from 1 to 64"),
        (["--rest.requests_per_second=nan"], "expected a number"),
        (["--tiers.dram.high_watermark=1.01"], "at most 1"),
        (["--tiers.dram.low_watermark=0"], "above 0"),
        (["--node.unix_mode=rw"], "octal"),
        (["--node.name=a/b"], "expected 1 to 64"),
        (["--node.name="], "expected 1 to 64"),
        (["--node.tcp_listen=7401"], "host:port"),
        (["--node.tcp_listen=localhost:65536"], "host:port"),
        (["--rest.listen=::1:7400"], "host:port"),
    ],
)
def test_a_bad_option_is_told_what_was_expected(options, message):
    with pytest.raises(ConfigError, match=message.replace("?", r"\?").replace("$", r"\Z")):
        load(None, HOME, options)


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        (
            "CAIRN_TIERS__DRAM__CAPCITY",
            "1",
            "CAIRN_TIERS__DRAM__CAPCITY: .*did you mean CAIRN_TIERS__DRAM__CAPACITY",
        ),
        ("CAIRN_TIERS_DRAM_CAPACITY", "1", "did you mean CAIRN_TIERS__DRAM__CAPACITY"),
        ("CAIRN_LIMITS__CONNECTIONS", "many", "CAIRN_LIMITS__CONNECTIONS: expected a whole number"),
    ],
)
def test_a_bad_variable_is_named(variable, value, message):
    with pytest.raises(ConfigError, match=message):
        load(None, HOME | {variable: value}, [])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[tiers.dram]\ncapcity = 1", "tiers.dram.capcity: .*did you mean tiers.dram.capacity"),
        ("[tier.dram]\ncapacity = 1", "did you mean tiers.dram.capacity"),
        ("tiers = 5", "tiers: there is no such setting"),
        ("[tiers.dram.capacity]\nbytes = 1", "tiers.dram.capacity.bytes: there is no such setting"),
        ("[limits]\nconnections = '5'", "limits.connections: expected a whole number from 1 to .*, not '5'"),
        ("[limits]\nconnections = [5]", "limits.connections.0: there is no such setting"),
        ("[node]\nname = 5", "node.name: expected .*, not 5"),
        ("[node]\ntls_cert = 5", "node.tls_cert: expected text, not 5"),
        ("[tiers.dram]\nprefault = 1", "tiers.dram.prefault: expected true or false, not 1"),
        ("[limits]\nwait_max = true", "limits.wait_max: expected a duration"),
        ("[limits]\nwait_max = 2026-11-30", "limits.wait_max: expected a duration"),
        ("[limits]\nwait_max = ?", "at line 2"),
        ("[tenants]\nname = 'a'", "tenants.name: there is no such setting"),
    ],
)
def test_a_bad_file_is_named_with_the_setting(toml, text, message):
    path = toml(text)
    with pytest.raises(ConfigError, match=message) as caught:
        load(path, HOME, [])
    assert str(caught.value).startswith(f"{path}: ")


def test_a_file_that_is_not_there_or_not_text_is_named(tmp_path):
    with pytest.raises(ConfigError, match=re.escape(f"{tmp_path}/node.toml: No such file")):
        load(tmp_path / "node.toml", HOME, [])
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.toml: .*utf-8"):
        load(tmp_path / "binary.toml", HOME, [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tiers.dram.low_watermark=0.97"],
            r"low watermark must be below the high one: tiers.dram.low_watermark is 0.97 "
            r"\(--tiers.dram.low_watermark\), tiers.dram.high_watermark is 0.95 \(default\)",
        ),
        (["--tiers.dram.slab=2GiB"], "slab must fit"),
        (["--tiers.dram.slab=0"], "multiple of 4KiB"),
        (["--tiers.dram.slab=5000"], "multiple of 4KiB"),
        (["--tiers.dram.huge_pages=require", "--tiers.dram.slab=1MiB"], "multiple of 2MiB"),
        (["--limits.frame_bytes=1KiB"], "64KiB"),
        (["--limits.inflight_bytes=1MiB"], "in flight"),
        (["--rest.body_bytes=0"], "body"),
        (["--node.tls_cert=/etc/cairn/cert.pem"], r"both .*node.tls_key is empty \(default\)"),
        (["--node.run_dir=/" + "x" * 100], "at most 107 bytes"),
    ],
)
def test_settings_that_contradict_each_other_are_named_with_their_sources(options, message):
    with pytest.raises(ConfigError, match=message):
        load(None, HOME, options)


# Tenants


def test_tenants_are_tables_in_the_file_and_numbered_elsewhere(toml):
    environ = HOME | {"CAIRN_TENANTS__0__QUOTA": "2GiB", "CAIRN_TENANTS__1__NAME": "b"}
    config = load(toml(TENANT), environ, [f"--tenants.1.token={'u' * 16}", "--tenants.1.may_write=false"])
    first, second = config.tenants
    assert (first.name, first.quota, first.may_write, first.admin) == ("default", 2 << 30, True, False)
    assert (second.name, second.token, second.may_write) == ("b", "u" * 16, False)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tenants.2.name=c"], "numbered from 0"),
        (["--tenants.01.name=c"], "no such setting"),
        (["--tenants.1.name=c"], "required field `token`"),
        (["--tenants.1.name=c", "--tenants.1.token=short"], "at least 16 characters: tenants.1.name is c"),
        (
            ["--tenants.1.name=c", "--tenants.1.token=with a blank in it"],
            "--tenants.1.token: expected printable",
        ),
        (["--tenants.1.name=c", f"--tenants.1.token={TOKEN}"], "share a token"),
        (["--tenants.1.name=default", f"--tenants.1.token={'u' * 16}"], "share a name"),
        (["--node.unix_tenant=nobody"], r"must be one of default, or none: node.unix_tenant is nobody"),
    ],
)
def test_bad_tenants_are_named(toml, options, message):
    with pytest.raises(ConfigError, match=message):
        load(toml(TENANT), HOME, options)


def test_the_unix_socket_can_ask_for_a_token_too(toml):
    assert load(toml(TENANT), HOME, ["--node.unix_tenant="]).node.unix_tenant == ""


def test_tokens_and_secrets_are_never_shown(toml):
    path = toml(TENANT + 'secret = "hush-hush"\n')
    settings = shown(path, HOME, [])
    assert settings["tenants.0.token"] == ("********", str(path))
    assert settings["tenants.0.secret"][0] == "********"
    config = load(path, HOME, [])
    assert config.tenants[0].token == TOKEN
    assert TOKEN not in repr(config)
    assert "hush" not in repr(config)
    with pytest.raises(ConfigError) as caught:
        load(path, HOME, ["--tenants.0.secret=not printable é"])
    assert "printable é" not in str(caught.value)


# Paths and addresses


@pytest.mark.parametrize(
    ("environ", "run_dir"),
    [
        ({"XDG_RUNTIME_DIR": "/run/user/7", "HOME": "/home/x"}, "/run/user/7/cairn"),
        ({"HOME": "/home/x"}, "/home/x/.cairn"),
        ({"XDG_RUNTIME_DIR": "", "HOME": "/home/x"}, "/home/x/.cairn"),
        ({"CAIRN_NODE__RUN_DIR": "/srv/cairn", "HOME": "/home/x"}, "/srv/cairn"),
    ],
)
def test_the_run_directory_is_the_user_s_own(environ, run_dir):
    node = load(None, environ, ["--node.name=a"]).node
    assert (node.run_dir, node.unix_socket) == (run_dir, f"{run_dir}/a.sock")


def test_without_a_home_the_run_directory_must_be_given():
    with pytest.raises(ConfigError, match=r"node\.run_dir must be set"):
        load(None, {}, [])


def test_a_socket_can_be_put_anywhere():
    assert load(None, HOME, ["--node.unix_socket=/tmp/c.sock"]).node.unix_socket == "/tmp/c.sock"


@pytest.mark.parametrize(
    ("listen", "pair"),
    [
        ("127.0.0.1:7401", ("127.0.0.1", 7401)),
        ("[::1]:0", ("::1", 0)),
        ("host.example:65535", ("host.example", 65_535)),
    ],
)
def test_an_address_is_host_and_port(listen, pair):
    assert host_port(listen) == pair
    assert load(None, HOME, [f"--node.tcp_listen={listen}"]).node.tcp_listen == listen


@pytest.mark.parametrize("listen", ["", "host", ":1", "::1:1", "host:", "host:65536", "host:x", "a b:1", "[::1]"])
def test_what_is_no_address_is_refused(listen):
    with pytest.raises(ValueError, match="expected host:port"):
        host_port(listen)


def test_the_tree_cannot_be_changed():
    with pytest.raises(AttributeError):
        load(None, HOME, []).node.name = "other"
    assert Config() == Config()
