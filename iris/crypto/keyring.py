"""Keyrings: the keys for each address, their rotation, and the file format.

    [default]                            # for every cluster and topic without an entry of its own
    keys = ["<48 characters of base64url>"]
    [clusters."databases"]               # for this cluster alone
    keys = ["<new>", "<old>"]            # the first key seals, all of them open
    [topics."orders.eu"]                 # for the topic orders.eu and all below it
    keys = ["..."]
    [topics."users.*"]                   # for each name below users, such as users.alice and all below it,
    derive = true                        # a key of its own, derived from these
    keys = ["..."]

A topic uses the entry of its longest prefix, by whole tokens; a cluster uses the entry with exactly its name. An entry
replaces the default; it does not add to it. In calls and errors an entry is named "default", by its cluster, or
"topic:PREFIX". An entry that derives is called "topic:PREFIX.*". It is for topics with a name below the prefix; an
entry of such a name goes before it. Whoever holds its keys can derive every key below it, and nobody else can: the
holder of a derived key has it as an entry of its own, [topics."users.alice"].

Rotation has three steps: `add` (the new key opens, but does not seal yet), `promote` (it seals), `retire` (the
old key is removed). A key that another one replaced has the comment "# replaced" behind it, so that a second `promote`
does not take it for a new one. This module does not read or write files; see `iris.keyfiles`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Self, TypeAlias, TypeVar

from iris.crypto.keys import KEY_ID_BYTES, ClusterKey, NetworkKey, SiteKey
from iris.errors import InvalidName, KeyringError
from iris.wire.names import check_cluster, check_filter, check_topic

Keys: TypeAlias = tuple[ClusterKey, ...]
_AnyKey = TypeVar("_AnyKey", ClusterKey, NetworkKey, SiteKey)

DEFAULT: Final = "default"
TOPIC: Final = "topic:"
DERIVES: Final = ".*"
"""How the name of an entry ends whose keys are derived for each topic."""
MAX_DERIVED: Final = 4096
"""Most topics whose derived keys a keyring remembers."""
_REPLACED: Final = re.compile(r'"([A-Za-z0-9_=-]+)",?[ \t]*# replaced\b')


class Keyring:
    """The keys of a process. Immutable: `add`, `promote` and `retire` return another keyring.

    If an address has several keys, the first seals and all open. An address without an entry, in a keyring without a
    default, has no keys: look-ups return an empty tuple.
    """

    __slots__ = ("_by_id", "_derived", "_derived_by_id", "_entries", "_replaced")

    def __init__(self, entries: Mapping[str, Sequence[ClusterKey]]) -> None:
        """`entries` maps "default", cluster names and "topic:PREFIX" to their keys.

        Raises:
            KeyringError: a name is outside the grammar, or an entry is empty or lists a key twice.
        """
        checked: dict[str, Keys] = {}
        for name in sorted(entries, key=_file_order):
            checked[_check_entry(name)] = _check_keys(name, tuple(entries[name]))
        self._entries: Final = checked
        self._derived: Final[dict[str, Keys]] = {}
        """Cache of at most `MAX_DERIVED`, the least recently used first: topic -> its derived keys."""
        self._derived_by_id: Final[dict[bytes, ClusterKey]] = {}
        """The keys in it, by their ids."""
        self._by_id: Final = {key.key_id: key for keys in checked.values() for key in keys}
        # (entry, key) of keys that another replaced. It guides the defaults of promote and retire, nothing else, so
        # it does not count when keyrings are compared.
        self._replaced: frozenset[tuple[str, ClusterKey]] = frozenset()

    @classmethod
    def single(cls, key: ClusterKey) -> Self:
        """Return a keyring with `key` for every address."""
        return cls({DEFAULT: (key,)})

    @classmethod
    def parse(cls, toml_text: str) -> Self:
        """Return the keyring written in `toml_text`.

        Raises:
            KeyringError: the text is not TOML, or not of the layout above. The error names the entry, never a secret.
        """
        document = _parse_toml(toml_text)
        if not document.keys() <= {"default", "clusters", "topics"}:
            # Do not name the other tables: if a header is missing, a secret may be in the place of the name.
            raise KeyringError(
                "a keyring may hold only the tables [default], [clusters.NAME] and [topics.PREFIX]"
            )
        entries: dict[str, Keys] = {}
        if "default" in document:
            entries[DEFAULT] = _parse_entry(ClusterKey, DEFAULT, document["default"])
        for table, prefix in (("clusters", ""), ("topics", TOPIC)):
            found = document.get(table, {})
            if not isinstance(found, dict):
                raise KeyringError(
                    f"{table} is not a table; write one table for each entry, as [{table}.NAME]"
                )
            for name, body in found.items():
                if table == "clusters" and _reserved(name):
                    raise KeyringError(
                        f"clusters: {name!r} cannot have an entry, because this name is reserved; rename the cluster"
                    )
                # Check the name before it appears in an error about its keys.
                entry = _check_entry(prefix + name)
                if prefix and isinstance(body, dict):
                    body = _without_derive(entry, body)
                entries[entry] = _parse_entry(ClusterKey, entry, body)
        replaced = {text.rstrip("=") for text in _REPLACED.findall(toml_text)}
        keyring = cls(entries)
        keyring._replaced = frozenset(
            (name, key)
            for name, keys in keyring._entries.items()
            for key in keys[1:]
            if replaced and key.reveal() in replaced
        )
        return keyring

    def dump(self) -> str:
        """Return the TOML text that `parse` reads. It contains every secret."""
        lines = [
            "# Iris keyring. In each entry the first key seals, all of them open. Keep secret."
        ]
        for name, keys in self._entries.items():
            old = [key for key in keys if (name, key) in self._replaced]
            lines += [
                "",
                f"[{_header(name)}]",
                *["derive = true"] * name.endswith(DERIVES),
                _dump_keys(keys, old),
            ]
        return "\n".join(lines) + "\n"

    def for_cluster(self, name: str) -> Keys:
        """Return the keys of the cluster `name`.

        A cluster called "default" or "topic:..." cannot have its own entry, because these names are reserved.
        """
        return (not _reserved(name) and self._entries.get(name)) or self._default()

    def for_topic(self, topic: str) -> Keys:
        """Return the keys of `topic`: those of its longest prefix with an entry."""
        prefix = topic
        while prefix:
            if keys := self._entries.get(TOPIC + prefix):
                return keys
            above = prefix.rpartition(".")[0]
            if above and TOPIC + above + DERIVES in self._entries:
                return self._derive(above, prefix)
            prefix = above
        return self._default()

    def for_filter(self, filter: str) -> Keys:
        """Return every key of every topic that `filter` may match, without duplicates.

        These are the keys of all entries that such a topic may use, from the most general to the most specific.
        The default is included only if some such topic has no other entry.

        Keys that are derived for names which the filter does not say cannot be listed. A filter with such topics alone
        has no keys; other filters have those of their other topics.

        Raises:
            InvalidName: `filter` is outside the grammar.
        """
        parts = check_filter(filter).split(".")
        found: set[str] = set()
        entries: dict[str, Keys] = {}
        for name, held in self._entries.items():
            if not name.endswith(DERIVES):
                entries[name] = held
                continue
            above = name.removeprefix(TOPIC).removesuffix(DERIVES).split(".")
            if parts[: len(above)] != above or len(parts) <= len(above):
                continue
            token = parts[len(above)]
            if token in ("*", ">"):
                return ()
            topic = ".".join((*above, token))
            if TOPIC + topic not in self._entries:
                entries[TOPIC + topic] = self._derive(".".join(above), topic)
        _walk(_tree(entries), parts, 0, DEFAULT, found)
        # A prefix comes before the longer ones.
        keys = (
            key
            for name in sorted(entries, key=_file_order)
            if name in found
            for key in entries[name]
        )
        return tuple(dict.fromkeys(keys))

    def by_id(self, key_id: bytes) -> ClusterKey | None:
        """Return the key with this 16-byte id from any entry, or None if the keyring does not hold it.

        Of derived keys it finds the `MAX_DERIVED` that were looked up last.
        """
        return self._by_id.get(key_id) or self._derived_by_id.get(key_id)

    def entries(self) -> dict[str, Keys]:
        """Return a copy of the entries: "default" first, then clusters, then topics, each sorted."""
        return dict(self._entries)

    def add(self, name: str, key: ClusterKey) -> Self:
        """Return a keyring in which the entry `name` also opens under `key`, listed last.

        A name without an entry gets one with the keys in effect for it, plus `key`. So the key that seals stays
        the same.

        Raises:
            KeyringError: the key is already in effect there, or the name is outside the grammar.
        """
        keys = self._entries.get(_check_entry(name)) or self._inherited(name)
        if key in keys:
            raise KeyringError(f"{name}: key {_short(key)} is already in effect there")
        return self._with(name, (*keys, key))

    def promote(self, name: str, key_id: bytes | None = None) -> Self:
        """Return a keyring in which the key `key_id` of the entry `name` is first, so it seals.

        Without `key_id`, the key added last is promoted. If it has been promoted before, nothing changes: a key that
        another one replaced is promoted only by its `key_id`.

        Raises:
            KeyringError: the keyring does not have this entry or key, or there is no other key to promote.
        """
        keys = self._entry(name)
        if key_id is None and len(keys) == 1:
            raise KeyringError(
                f"{name}: {_short(keys[0])} is its only key, and already seals; add another first"
            )
        if key_id is not None:
            key = _pick(name, keys, key_id)
        else:
            key = next(
                (key for key in reversed(keys) if (name, key) not in self._replaced), keys[0]
            )
        if key == keys[0]:
            return self
        # Behind the key that seals: keys added before it, the newest first; the one that sealed; those it had replaced;
        # and keys added later, which can still be promoted.
        at = keys.index(key)
        skipped = [other for other in keys[1:at] if (name, other) not in self._replaced]
        old = [other for other in keys if (name, other) in self._replaced and other != key]
        later = [other for other in keys[at + 1 :] if (name, other) not in self._replaced]
        replaced = (*reversed(skipped), keys[0], *old)
        return self._with(name, (key, *replaced, *later), {(name, other) for other in replaced})

    def retire(self, name: str, key_id: bytes | None = None) -> Self:
        """Return a keyring without the key `key_id` of the entry `name`, which must not be the one that seals.

        Without `key_id`, the key that was replaced first is removed; if none was replaced, the last one.

        Raises:
            KeyringError: the keyring does not have this entry or key, the key is the only one, or it is the
                first, which seals; promote another before.
        """
        keys = self._entry(name)
        if key_id is None:
            key = next((key for key in reversed(keys) if (name, key) in self._replaced), keys[-1])
        else:
            key = _pick(name, keys, key_id)
        if len(keys) == 1:
            raise KeyringError(f"{name}: {_short(key)} is its only key; add another first")
        if key == keys[0]:
            raise KeyringError(
                f"{name}: {_short(key)} is the key that seals; promote another first"
            )
        return self._with(name, tuple(other for other in keys if other != key))

    def __eq__(self, other: object) -> bool:
        return self._entries == other._entries if isinstance(other, Keyring) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self._entries.items()))

    def __repr__(self) -> str:
        entries = ", ".join(
            f"{name}: {' '.join(map(_short, keys))}" for name, keys in self._entries.items()
        )
        return f"<Keyring {entries or 'empty'}>"

    def _derive(self, above: str, topic: str) -> Keys:
        """Return the keys of `topic`, whose prefix `above` has an entry that derives."""
        keys = self._derived.pop(topic, None)
        if keys is None:
            keys = tuple(key.for_topic(topic) for key in self._entries[TOPIC + above + DERIVES])
            self._derived_by_id.update((key.key_id, key) for key in keys)
            if len(self._derived) >= MAX_DERIVED:
                oldest = next(iter(self._derived))
                for key in self._derived.pop(oldest):
                    del self._derived_by_id[key.key_id]
        self._derived[topic] = keys
        return keys

    def _default(self) -> Keys:
        return self._entries.get(DEFAULT, ())

    def _inherited(self, name: str) -> Keys:
        """Return the keys in effect for `name` while it has no entry."""
        if name.endswith(DERIVES):
            return ()  # keys that were never used to derive would be of no use
        return (
            self.for_topic(name.removeprefix(TOPIC)) if name.startswith(TOPIC) else self._default()
        )

    def _entry(self, name: str) -> Keys:
        if not (keys := self._entries.get(_check_entry(name))):
            raise KeyringError(
                f"{name}: the keyring has no entry with this name; add a key to it first"
            )
        return keys

    def _with(
        self, name: str, keys: Keys, replaced: Iterable[tuple[str, ClusterKey]] | None = None
    ) -> Self:
        """Return a keyring with other `keys` for `name`, and `replaced` among them; None keeps what was replaced."""
        changed = type(self)({**self._entries, name: keys})
        changed._replaced = frozenset(
            (entry, key)
            for entry, key in self._replaced
            if entry != name or (replaced is None and key in keys)
        ) | frozenset(replaced or ())
        return changed


def parse_network_keys(toml_text: str) -> tuple[NetworkKey, ...]:
    """Return the network keys of a file with one table, [network], laid out like an entry above.

    Relays dial with the first key and accept all of them.

    Raises:
        KeyringError: the text is not TOML, or not of this layout. The error never repeats a secret.
    """
    document = _parse_toml(toml_text)
    if document.keys() != {"network"}:
        raise KeyringError("a network key file must hold one table, [network], and nothing else")
    return _check_keys("network", _parse_entry(NetworkKey, "network", document["network"]))


def dump_network_keys(keys: Sequence[NetworkKey]) -> str:
    """Return the TOML text that `parse_network_keys` reads. It contains every secret."""
    head = "# Iris network key: admits relays, opens no payload. The first dials. Keep secret."
    return f"{head}\n\n[network]\n{_dump_keys(_check_keys('network', tuple(keys)))}\n"


def parse_site_key(toml_text: str) -> SiteKey:
    """Return the key of a file with one table, [site], laid out like an entry above with one key.

    Raises:
        KeyringError: the text is not TOML, or not of this layout. The error never repeats a secret.
    """
    document = _parse_toml(toml_text)
    if document.keys() != {"site"}:
        raise KeyringError("a site key file must hold one table, [site], and nothing else")
    keys = _parse_entry(SiteKey, "site", document["site"])
    if len(keys) != 1:
        raise KeyringError(f"site: must list exactly one key, not {len(keys)}")
    return keys[0]


def dump_site_key(key: SiteKey) -> str:
    """Return the TOML text that `parse_site_key` reads. It contains the secret."""
    head = (
        "# Iris site key: shows this site's gateways to other sites, opens no payload. Keep secret."
    )
    return f"{head}\n\n[site]\n{_dump_keys((key,))}\n"


class _Node:
    """A node of the tree of topic prefixes, one level per token. `entry` is the name of the entry that ends here."""

    __slots__ = ("children", "entry")

    def __init__(self) -> None:
        self.children: dict[str, _Node] = {}
        self.entry: str | None = None


def _tree(names: Iterable[str]) -> _Node:
    root = _Node()
    for name in names:
        node = root
        if name.startswith(TOPIC):
            for token in name.removeprefix(TOPIC).split("."):
                node = node.children.setdefault(token, _Node())
            node.entry = name
    return root


def _walk(node: _Node, parts: list[str], at: int, entry: str, found: set[str]) -> None:
    """Add to `found` the entry of every topic that starts with `node` and matches `parts[at:]`.

    `entry` is the entry of such a topic if no longer prefix has one. A wildcard may match a token that no entry
    has, so it always reaches `entry`, too.
    """
    entry = node.entry or entry
    part = parts[at] if at < len(parts) else None
    if part not in node.children:  # a token without an entry, a wildcard, or the end of the filter
        found.add(entry)
    if part == ">":
        for child in node.children.values():
            _walk(child, parts, at, entry, found)
    elif part == "*":
        for child in node.children.values():
            _walk(child, parts, at + 1, entry, found)
    elif part in node.children:
        _walk(node.children[part], parts, at + 1, entry, found)


def _reserved(name: str) -> bool:
    return name == DEFAULT or name.startswith(TOPIC)


def _check_entry(name: str) -> str:
    try:
        if name.startswith(TOPIC):
            check_topic(name.removeprefix(TOPIC).removesuffix(DERIVES))
        else:
            check_cluster(name)
    except InvalidName as error:
        raise KeyringError(str(error)) from None  # the cause says the same
    return name


def _check_keys(name: str, keys: tuple[_AnyKey, ...]) -> tuple[_AnyKey, ...]:
    if not keys:
        raise KeyringError(f"{name}: does not list a key; add one")
    if len(set(keys)) != len(keys):
        raise KeyringError(f"{name}: lists the same key twice; remove one of the two")
    return keys


def _parse_toml(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        # Keep the position only: the rest of the message may quote the text, and so a secret.
        found = re.search(r"line \d+, column \d+", str(error))
    raise KeyringError(f"not valid TOML{f' at {found[0]}' if found else ': it ends too early'}")


def _without_derive(name: str, body: dict[str, Any]) -> dict[str, Any]:
    """Return the rest of the entry of a topic, after a check that it derives if its name says so, and only then."""
    derives = body.get("derive", False)
    if not isinstance(derives, bool) or derives != name.endswith(DERIVES):
        raise KeyringError(
            f'{name}: write derive = true in an entry [topics."PREFIX.*"], and in no other'
        )
    return {setting: value for setting, value in body.items() if setting != "derive"}


def _parse_entry(kind: type[_AnyKey], name: str, body: object) -> tuple[_AnyKey, ...]:
    if not isinstance(body, dict) or body.keys() != {"keys"} or not isinstance(body["keys"], list):
        raise KeyringError(f'{name}: must hold one setting, keys = ["...", ...], and nothing else')
    keys: list[_AnyKey] = []
    for number, text in enumerate(body["keys"], 1):
        try:
            keys.append(kind.parse(text))
        except KeyringError as error:
            raise KeyringError(f"{name}: key {number}: {error}") from None
    return tuple(keys)


def _dump_keys(
    keys: Sequence[ClusterKey] | Sequence[NetworkKey] | Sequence[SiteKey],
    replaced: Sequence[ClusterKey] = (),
) -> str:
    # base64url needs no escapes.
    lines = [f'    "{key.reveal()}",{"  # replaced" * (key in replaced)}' for key in keys]
    return "\n".join(["keys = [", *lines, "]"])


def _header(name: str) -> str:
    if name == DEFAULT:
        return name
    table, name = ("topics", name[len(TOPIC) :]) if name.startswith(TOPIC) else ("clusters", name)
    # Names have no control characters, so only these two need an escape.
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'{table}."{escaped}"'


def _file_order(name: str) -> tuple[bool, bool, str]:
    return name != DEFAULT, name.startswith(TOPIC), name


def _pick(name: str, keys: Keys, key_id: bytes) -> ClusterKey:
    for key in keys:
        if key.key_id == key_id:
            return key
    shown = key_id.hex()[:8] if len(key_id) == KEY_ID_BYTES else "of this id"
    raise KeyringError(f"{name}: key {shown} is not listed there; `iris key show` lists the keys")


def _short(key: ClusterKey) -> str:
    return key.key_id.hex()[:8]
