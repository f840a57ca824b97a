"""Who a token belongs to. Without configured tenants there is one, whose token lies in the run directory."""

import hmac
import os
import secrets
from pathlib import Path

from engine_client.address import TOKEN_FILE
from kvstore.catalogue import Tenant
from kvstore.errors import ConfigError, Forbidden
from server.config import Config

DEFAULT_TENANT = "default"


class Doorkeeper:
    """Tenants by token, compared in constant time. `unix_tenant` may come over the Unix socket without one."""

    def __init__(self, tenants: dict[str, tuple[str, Tenant]], unix_tenant: str) -> None:
        self._tenants = tenants
        self._unix_tenant = unix_tenant

    def admit(self, token: str) -> Tenant:
        """The tenant of `token`. Takes as long for a wrong one as for a right one. Raises Forbidden."""
        offered = token.encode("utf-8", "surrogatepass")
        admitted = None
        for expected, tenant in self._tenants.values():
            if hmac.compare_digest(expected.encode(), offered):
                admitted = tenant
        if admitted is None:
            raise Forbidden("a token is needed" if not token else "the token is not known here")
        return admitted

    def admit_local(self, token: str) -> Tenant:
        """As `admit`; without a token the Unix socket's own tenant, whom the socket's file mode let in."""
        if not token and self._unix_tenant in self._tenants:
            return self._tenants[self._unix_tenant][1]
        return self.admit(token)


def doorkeeper(config: Config) -> Doorkeeper:
    """From the settings; makes the run directory's token file if no tenants are configured."""
    tenants = {
        settings.name: (
            settings.token,
            Tenant(settings.name, settings.secret, settings.quota, settings.may_write, settings.admin),
        )
        for settings in config.tenants
    }
    if not tenants:
        token, secret = _own_token(Path(config.node.run_dir))
        tenants[DEFAULT_TENANT] = token, Tenant(DEFAULT_TENANT, secret=secret, admin=True)
    return Doorkeeper(tenants, config.node.unix_tenant)


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
