"""Tenants and the namespaces they opened: which name stands for what, and which number and root it has."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvstore.errors import InvalidRequest, NamespaceMismatch, NotFound, Rejected
from kvstore.prefix import Namespace
from kvstore.table import Space
from kvstore.types import KEY_BYTES, BlockKey

NAMESPACES_PER_NODE = 65_535  # its number is a u16 in the published index
NAME_BYTES = 128


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who stores here. `quota_bytes` 0 is no quota. The secret makes its keys unguessable to others."""

    name: str
    secret: str = field(default="", repr=False)
    quota_bytes: int = 0
    may_write: bool = True
    admin: bool = False


@dataclass(slots=True, eq=False)
class OpenNamespace:
    """A namespace of a tenant on this node; `spaces` are its replicas by tier, fastest first."""

    number: int
    tenant: Tenant
    namespace: Namespace
    root: BlockKey
    spaces: Sequence[Space]
    names: list[str] = field(default_factory=list)
    hit_blocks: int = 0
    missed_blocks: int = 0

    @property
    def key_bytes(self) -> int:
        return KEY_BYTES if self.namespace.parts == 1 else KEY_BYTES + 2


class Catalogue:
    """Namespaces by tenant and name. Two names for the same fields are the same namespace."""

    def __init__(self, namespaces_per_tenant: int) -> None:
        self._limit = namespaces_per_tenant
        self._by_name: dict[tuple[str, str], OpenNamespace] = {}
        self._by_root: dict[tuple[str, BlockKey], OpenNamespace] = {}
        self._by_number: dict[int, OpenNamespace] = {}
        self._numbers = count(1)

    def find(self, tenant: Tenant, name: str) -> OpenNamespace:
        found = self._by_name.get((tenant.name, name))
        if found is None:
            raise NotFound(f"no namespace {name!r} of tenant {tenant.name}")
        return found

    def numbered(self, tenant: Tenant, number: int) -> OpenNamespace:
        """The namespace that the tenant opened under this number."""
        found = self._by_number.get(number)
        if found is None or found.tenant.name != tenant.name:
            raise NotFound(f"no namespace number {number} of tenant {tenant.name}")
        return found

    def of_number(self, number: int) -> OpenNamespace | None:
        return self._by_number.get(number)

    def all(self) -> Iterator[OpenNamespace]:
        return iter(self._by_number.values())

    def of_tenant(self, tenant: Tenant) -> Iterator[OpenNamespace]:
        return (found for found in self._by_number.values() if found.tenant.name == tenant.name)

    def define(self, tenant: Tenant, name: str, namespace: Namespace) -> tuple[OpenNamespace, bool]:
        """The namespace behind `name`, made if need be: (it, whether it is new and needs its spaces).

        Raises NamespaceMismatch when the name stands for other fields, Rejected at the limit.
        """
        if not name.isprintable() or not 0 < len(name.encode()) <= NAME_BYTES or "/" in name:
            raise InvalidRequest(f"a namespace's name has 1 to {NAME_BYTES} printable bytes and no '/'")
        found = self._by_name.get((tenant.name, name))
        if found is not None:
            differences = found.namespace.differences(namespace)
            if differences:
                raise NamespaceMismatch(f"{name!r} stands for another namespace: {'; '.join(differences)}")
            return found, False
        root = namespace.root(tenant.name, tenant.secret)
        found = self._by_root.get((tenant.name, root))
        is_new = found is None
        if sum(key[0] == tenant.name for key in self._by_name) >= self._limit:
            raise Rejected(f"tenant {tenant.name} has {self._limit} namespaces: namespaces_per_tenant")
        if found is None:
            if len(self._by_number) >= NAMESPACES_PER_NODE:
                raise Rejected(f"this node has {NAMESPACES_PER_NODE} namespaces, as many as it can number")
            found = OpenNamespace(next(self._numbers), tenant, namespace, root, ())
            self._by_root[tenant.name, root] = found
            self._by_number[found.number] = found
        found.names.append(name)
        self._by_name[tenant.name, name] = found
        return found, is_new
