"""The settings of a gateway, and which it refuses."""

import pytest

from kvstore.errors import ConfigError
from server.gateway.settings import defaults, load

TOKEN = "sixteen-letters-"


def test_defaults_are_good():
    settings = load(None, {}, []).gateway
    assert settings.listen == "127.0.0.1:8000"
    assert settings.conductor == "http://127.0.0.1:7410"
    assert defaults()["gateway.tries"] == "4"


def test_a_file_may_be_shared_with_a_node(tmp_path):
    path = tmp_path / "cairn.toml"
    path.write_text(f'[tiers.dram]\ncapacity = "1GiB"\n[[tenants]]\nname = "a"\ntoken = "{TOKEN}"\nquota = "1GiB"\n')
    assert [tenant.name for tenant in load(path, {}, []).tenants] == ["a"]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--gateway.listen="], "gateway.listen"),
        (["--gateway.conductor=tcp://x:1"], "expected a URL"),
        (["--gateway.body_bytes=0"], "gateway.body_bytes"),
        (["--gateway.tries=0"], "gateway.tries"),
        (["--tenants.0.name=a", "--tenants.0.token=short"], "at least 16"),
        (
            [f"--tenants.{n}.{name}" for n in (0, 1) for name in (f"name=t{n}", f"token={TOKEN}")],
            "share a token",
        ),
        (["--gateway.conductr=http://x:1"], "did you mean"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        load(None, {}, options)


def test_secrets_do_not_reach_a_log():
    config = load(None, {}, ["--tenants.0.name=a", f"--tenants.0.token={TOKEN}"])
    assert TOKEN not in repr(config)
