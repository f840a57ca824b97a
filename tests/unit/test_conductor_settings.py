"""The settings of the Conductor, and that services may share a file and an environment."""

from pathlib import Path

import pytest

from kvstore.errors import ConfigError
from server.conductor.settings import ConductorConfig, defaults, load, node_addresses, weights
from server.config import Config
from server.config import load as load_node
from server.sources import SECTIONS

HOME = {"HOME": "/home/u"}


def test_without_sources_it_listens_on_loopback_only() -> None:
    config = load(None, {}, [])
    assert config.conductor.listen == "127.0.0.1:7410"
    assert (config.conductor.ttft_slo, config.conductor.tbt_slo) == (30.0, 0.1)
    assert config == ConductorConfig()


def test_the_command_line_outweighs_the_environment_and_that_the_file(tmp_path: Path) -> None:
    path = tmp_path / "cairn.toml"
    path.write_text('[conductor]\npolicy = "random"\nttft_slo = "10s"\nheartbeat = "3s"\n')
    environ = {"CAIRN_CONDUCTOR__TTFT_SLO": "20s", "CAIRN_CONDUCTOR__HEARTBEAT": "2s"}
    found = load(path, environ, ["--conductor.heartbeat=500ms"]).conductor
    assert (found.policy, found.ttft_slo, found.heartbeat) == ("random", 20.0, 0.5)


def test_a_node_and_a_conductor_share_one_file_and_one_environment(tmp_path: Path) -> None:
    path = tmp_path / "cairn.toml"
    path.write_text(
        '[conductor]\npolicy = "random"\n[gateway]\nlisten = "x"\n[node]\nname = "n1"\n[log]\nlevel = "debug"\n'
        '[[tenants]]\nname = "default"\ntoken = "0123456789abcdef"\n'
    )
    environ = {"CAIRN_CONDUCTOR__TTFT_SLO": "20s", "CAIRN_NODE__NAME": "n2", "CAIRN_WORKER__ROLE": "both"}
    assert load(path, environ, []).conductor.ttft_slo == 20.0
    node = load_node(path, environ | HOME, [])
    assert (node.node.name, node.log.level, len(node.tenants)) == ("n2", "debug", 1)


def test_every_section_of_a_service_is_known_to_the_others() -> None:
    assert {*Config.__struct_fields__, *ConductorConfig.__struct_fields__} <= SECTIONS


def test_a_section_that_no_service_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="there is no such setting"):
        load(None, {"CAIRN_CONDUCTER__TOKEN": "x"}, [])
    with pytest.raises(ConfigError, match="there is no such setting"):
        load_node(None, {"CAIRN_NODES__NAME": "x"} | HOME, [])


def test_an_option_of_another_service_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--node\.name: there is no such setting"):
        load(None, {}, ["--node.name=x"])
    with pytest.raises(ConfigError, match=r"--conductor\.token: there is no such setting"):
        load_node(None, HOME, ["--conductor.token=x"])


@pytest.mark.parametrize(
    ("option", "complaint"),
    [
        ("--conductor.policy=kvcache_central", "did you mean kvcache_centric"),
        ("--conductor.admission=late", "expected one of none, baseline"),
        ("--conductor.listen=", "listens nowhere"),
        ("--conductor.listen=7410", "expected host:port"),
        ("--conductor.token=short", "at least 16 characters"),
        ("--conductor.heartbeat=1ms", "at least 50ms"),
        ("--conductor.body=0", "room for a byte"),
        ("--conductor.nodes=a", "expected name=tcp://host:port"),
        ("--conductor.nodes=a=http://h:1", "is no address"),
        ("--conductor.nodes=a=tcp://h:1,a=tcp://i:1", "may not share a name"),
        ("--conductor.shares=a", "expected tenant=2"),
        ("--conductor.shares=a=0", "must be above 0"),
        ("--conductor.tbt_slo=0", "expected a duration above 0"),
        ("--scaling.prefill_min=65", "the least may not be above the most"),
        ("--scaling.decode_min=65", "the least may not be above the most"),
    ],
)
def test_settings_that_are_no_good_are_refused_by_name(option: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        load(None, {}, [option])


def test_lists_are_written_in_one_line() -> None:
    assert node_addresses("a=tcp://h:1,b=unix:///run/b.sock") == {"a": "tcp://h:1", "b": "unix:///run/b.sock"}
    assert node_addresses("") == {}
    assert weights("a=2,b=0.5") == {"a": 2.0, "b": 0.5}


def test_secrets_are_not_shown_and_every_setting_has_a_default() -> None:
    shown = defaults()
    assert shown["conductor.ttft_slo"] == "30s"
    assert all(value != "" or name.split(".")[-1] in EMPTY for name, value in shown.items())


EMPTY = {"token", "nodes", "node_token", "node_ca_file", "shares"}
