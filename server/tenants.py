"""Who a token belongs to. Without configured tenants there is one, whose token lies in the run directory."""

import hashlib
import hmac
import os
import secrets
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from engine_client.address import TOKEN_FILE
from kvstore.catalogue import Tenant
from kvstore.errors import ConfigError, Forbidden, NotFound
from server.config import Config

DEFAULT_TENANT = "default"


class Doorkeeper:
    """(token, tenant) pairs, compared in constant time. `unix_tenant` may come over the Unix socket without one."""

    def __init__(self, tokens: Sequence[tuple[str, Tenant]], unix_tenant: str, cluster_token: str = "") -> None:
        self._cluster_token = cluster_token
        self._tokens = tokens
        self.tenants = [tenant for _, tenant in tokens]
        self._unix_tenant = next((tenant for _, tenant in tokens if tenant.name == unix_tenant), None)

    def admit(self, token: str) -> Tenant:
        """The tenant of `token`. Takes as long for a wrong one as for a right one. Raises Forbidden."""
        offered = token.encode("utf-8", "surrogatepass")
        admitted = None
        for expected, tenant in self._tokens:
            if hmac.compare_digest(expected.encode(), offered):
                admitted = tenant
        if admitted is None:
            raise Forbidden("a token is needed" if not token else "the token is not known here")
        return admitted

    def admit_node(self, token: str) -> bool:
        """Whether this is another node of the cluster."""
        offered = token.encode("utf-8", "surrogatepass")
        return bool(self._cluster_token) and hmac.compare_digest(self._cluster_token.encode(), offered)

    def named(self, name: str) -> Tenant:
        """The tenant of this name, who may write. NotFound."""
        found = next((tenant for tenant in self.tenants if tenant.name == name), None)
        if found is None:
            raise NotFound(f"no tenant {name!r} on this node")
        return found

    def admit_local(self, token: str) -> Tenant:
        """As `admit`; without a token the Unix socket's own tenant, whom the socket's file mode let in."""
        if not token and self._unix_tenant is not None:
            return self._unix_tenant
        return self.admit(token)


def doorkeeper(config: Config) -> Doorkeeper:
    """From the settings; makes the run directory's token file if no tenants are configured."""
    tokens: list[tuple[str, Tenant]] = []
    for settings in config.tenants:
        tenant = Tenant(settings.name, settings.secret, settings.quota, settings.may_write, settings.admin)
        tokens.append((settings.token, tenant))
        if settings.read_token:
            tokens.append((settings.read_token, replace(tenant, may_write=False, admin=False)))
    if not tokens:
        token, secret = _own_token(Path(config.node.run_dir))
        if config.cluster.coordinator:
            secret = _shared_secret(config.cluster.token)
        tokens.append((token, Tenant(DEFAULT_TENANT, secret=secret, admin=True)))
    cluster_token = config.cluster.token if config.cluster.coordinator else ""
    return Doorkeeper(tokens, config.node.unix_tenant, cluster_token)


def _shared_secret(cluster_token: str) -> str:
    """Of the default tenant of all nodes of a cluster: the same tokens have the same keys on each."""
    return hashlib.blake2b(cluster_token.encode(), digest_size=24, person=b"cairn-tenant").hexdigest()


def _own_token(run_dir: Path) -> tuple[str, str]:
    """(token, secret) of the default tenant, kept in a file that only this user can read."""
    path = run_dir / TOKEN_FILE
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        words = path.read_text().split()
        if len(words) != 2:
            raise ConfigError(f"{path} does not hold a token and a secret; remove it") from None
        return words[0], words[1]
    with os.fdopen(fd, "w") as file:
        token, secret = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
        file.write(f"{token} {secret}\n")
    return token, secret
