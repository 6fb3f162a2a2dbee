"""Who may ask the server for something, decided from a request's headers.

With keys, whoever gives one. Without keys, programs of this machine: there a browser would let any
page send requests, and a name of somebody else's may point here. So `Host` must be our own, and
`Origin` where there is one. The live page wants a key and checks both.
"""

import hashlib
import secrets
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qs

from starlette.types import Scope

from speq.files.regular_file import read_keys
from speq.server.api_error import ApiError

# What load balancers ask, which have no key.
OPEN_PATHS = frozenset({"/health"})
# The chat page and its files, in which nothing is secret: it asks for a key itself.
CHAT_FILES = ("chat.js", "chat.css", "page.css")
# What changes the server, with a key of its own.
ADMIN_PATHS = frozenset({"/v1/speq/resize"})
CHAT_PATHS = frozenset({"/", *(f"/assets/{name}" for name in CHAT_FILES)})


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of clients. digests: SHA-256 of each; nothing else of them is kept"""

    digests: tuple[bytes, ...]

    @classmethod
    def read(cls, path: Path) -> "Keys":
        """Read a file with a key in each line. Raises SpeqError for any other file, and for one
        that others may read.
        """
        return cls(tuple(digest(key) for key in read_keys(path)))

    def hold(self, given: str) -> bool:
        """Return whether this is one of the keys, in the same time whichever it is."""
        asked = digest(given)
        return sum([secrets.compare_digest(asked, known) for known in self.digests]) > 0


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


@dataclass(frozen=True, slots=True)
class Access:
    """The rules of one address.

    host, port  where the server listens
    keys        of which a request must give one; None: it need not
    admin_keys  of which one that changes the server must give one; None: nobody may
    max_body_bytes  of what is posted
    page        the live page is there: its key may stand in the query, where browsers write it
    hosts       further names by which clients reach the server, such as host.docker.internal
    origins     of pages that may ask from browsers; "*": of all
    """

    host: str
    port: int
    keys: Keys | None
    max_body_bytes: int
    page: bool = False
    hosts: tuple[str, ...] = ()
    origins: tuple[str, ...] = ()
    admin_keys: Keys | None = None

    @property
    def authority(self) -> str:
        """The address as URLs have it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def authorities(self) -> frozenset[str]:
        """What may stand in `Host`."""
        hosts = ("localhost", *self.hosts)
        names = {self.authority, *(f"{each.lower()}:{self.port}" for each in hosts)}
        if self.port == 80:  # which nobody writes
            names |= {name.removesuffix(":80") for name in names}
        return frozenset(names)

    def refusal(self, scope: Scope) -> ApiError | None:
        """Why a request is refused; None where it is not."""
        refused = None
        if self.page or self.keys is None:
            refused = self._wrong_host(scope) or self._wrong_origin(scope)
        return refused or self._wrong_key(scope) or self._wrong_body(scope)

    def owner(self, scope: Scope) -> str:
        """Who asks, of a request that is not refused: all are one where there is one key."""
        if self.keys is None or len(self.keys.digests) == 1:
            return ""
        return "".join(digest(given).hex() for given in self._given_keys(scope))

    def _wrong_host(self, scope: Scope) -> ApiError | None:
        given = values(scope, b"host")
        if len(given) == 1 and given[0].lower() in self.authorities:
            return None
        asked = ", ".join(given) or "no host"
        return ApiError(421, f"the request is for {asked}; open the address speq printed")

    def _wrong_origin(self, scope: Scope) -> ApiError | None:
        given = values(scope, b"origin")
        if {origin.lower() for origin in given} <= {f"http://{name}" for name in self.authorities}:
            return None
        if self.shared_with(scope) is not None:
            return None
        asker = ", ".join(given)
        remedy = "only speq's own page may ask" if self.page else "--cors allows a page's origin"
        return ApiError(403, f"the request comes from {asker}; {remedy}")

    def shared_with(self, scope: Scope) -> str | None:
        """The origin of a page that may read the answer, as its browser says it; None: no other
        page may.
        """
        given = values(scope, b"origin")
        if len(given) != 1 or not {"*", given[0].lower()} & {each.lower() for each in self.origins}:
            return None
        return given[0]

    def _wrong_key(self, scope: Scope) -> ApiError | None:
        keys = self.keys
        if scope["path"] in ADMIN_PATHS:
            keys = self.admin_keys
            if keys is None:
                return ApiError(403, "this server has no admin key; start it with --admin-key-file")
        elif keys is None or (scope["path"] in OPEN_PATHS | CHAT_PATHS and not self.page):
            return None
        given = self._given_keys(scope)
        # One right and one wrong are refused: who guesses may not try two at a time.
        if len(given) == 1 and keys.hold(given[0]):
            return None
        what = "has another key" if given else "has no key"
        remedy = (
            "open the address speq printed"
            if self.page
            else "give Authorization: Bearer KEY with a key of this server"
            if keys is self.keys
            else "give Authorization: Bearer KEY with an admin key of this server"
        )
        headers = {"www-authenticate": "Bearer"}
        return ApiError(
            401, f"the request {what}; {remedy}", code="invalid_api_key", headers=headers
        )

    def _given_keys(self, scope: Scope) -> list[str]:
        """Keys that a request gives, as often as it gives them; "" where it is no bearer's.
        Clients of Anthropic's API have a header of their own.
        """
        given = values(scope, b"x-api-key")
        for value in values(scope, b"authorization"):
            scheme, _, rest = value.partition(" ")
            given.append(rest.strip() if scheme.lower() == "bearer" else "")
        if self.page:
            query = parse_qs(scope["query_string"].decode("latin-1"), keep_blank_values=True)
            given += query.get("token", [])
        return given

    def _wrong_body(self, scope: Scope) -> ApiError | None:
        """Unless what is posted is JSON of a length that is known and not too long.

        A form of another page cannot say that it is JSON without being asked whether it may.
        """
        if scope["method"] != "POST":
            return None
        kinds = values(scope, b"content-type")
        if len(kinds) != 1 or kinds[0].partition(";")[0].strip().lower() != "application/json":
            given = ", ".join(kinds) or "nothing"
            return ApiError(415, f"the content type is {given}; post application/json")
        lengths = values(scope, b"content-length")
        chunked = values(scope, b"transfer-encoding")
        if chunked or len(lengths) != 1 or not (lengths[0].isascii() and lengths[0].isdigit()):
            return ApiError(411, "the body's length is not known; give its Content-Length")
        if len(lengths[0]) > 18 or int(lengths[0]) > self.max_body_bytes:
            most = self.max_body_bytes
            return ApiError(413, f"the body is {lengths[0]:.20} bytes; {most} are taken")
        return None


def values(scope: Scope, name: bytes) -> list[str]:
    """What headers of a name, in small letters, give, as often as they give it."""
    headers: Iterable[tuple[bytes, bytes]] = scope["headers"]
    return [value.decode("latin-1").strip() for key, value in headers if key == name]
