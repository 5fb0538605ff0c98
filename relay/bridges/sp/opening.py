"""Open the sockets of entries: options, TLS, and the address that they got. With `sockets` the only user of pynng."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Final

import pynng

from iris import ConfigError, KeyringError
from iris.keyfiles import read_secret
from relay.bridges.sp.config import SocketConfig

RECONNECT_MIN_MS: Final = 100
RECONNECT_MAX_MS: Final = 2000

_KINDS: Final[dict[str, Any]] = {
    "rep": pynng.Rep0,
    "req": pynng.Req0,
    "respondent": pynng.Socket,
    "surveyor": pynng.Surveyor0,
    "sub": pynng.Sub0,
    "pub": pynng.Pub0,
    "pull": pynng.Pull0,
    "push": pynng.Push0,
    "bus": pynng.Bus0,
    "pair": pynng.Pair0,
}
_WITHOUT_RECEIVE_BUFFER: Final = ("rep", "req", "pub", "push")
_WITHOUT_SEND_BUFFER: Final = ("rep", "req", "sub", "pull", "push", "pair")
"""push and pair could have a send buffer, but it would outlive the peer: the next peer would get a
tunnel's messages, and pushes would get lost.
"""


def new_socket(config: SocketConfig) -> Any:
    """Return the pynng socket of an entry, which neither listens nor dials yet; raises ConfigError."""
    try:
        return _KINDS[config.protocol](**_options(config))
    except pynng.NNGException as err:
        raise ConfigError(f"{config.label}: {err}") from err


def start(socket: Any, config: SocketConfig) -> str:
    """Listen or begin to dial; return the address, with the port that was chosen. Raises ConfigError."""
    field = "listen" if config.listen else "dial"
    path = Path(config.address.removeprefix("ipc://")) if config.scheme == "ipc" else None
    try:
        if not config.listen:
            socket.dial(config.dial, block=False)
            return config.address
        if path is not None and path.exists() and not path.is_socket():
            # nng would take it for the socket of a killed process and remove it.
            raise ConfigError(
                f"{config.label}: listen: {path} exists and is not a socket; choose another path"
            )
        listener = _listen(socket, config)
    except (OSError, pynng.NNGException) as err:
        raise ConfigError(f"{config.label}: {field}: {config.address}: {err}") from err
    return _bound(listener, config)


def _listen(socket: Any, config: SocketConfig) -> Any:
    """Listen on a socket with listener options, which `socket.listen` lacks.

    An ipc socket gets its mode before nng listens.
    """
    lib = pynng.lib
    found = pynng.ffi.new("nng_listener *")
    pynng.check_err(lib.nng_listener_create(found, socket.socket, str(config.listen).encode()))
    listener = pynng.Listener(found, socket)
    socket._listeners[listener.id] = listener
    if config.scheme != "ipc":
        pynng.check_err(lib.nng_listener_start(listener.listener, 0))
        return listener
    mode = config.ipc_mode
    pynng.check_err(lib.nng_listener_set_int(listener.listener, b"ipc:permissions", mode))
    # nng binds, sets the mode, then listens. A process that passes the permission check before the
    # mode is set, and is delayed until nng listens, would be let in. The umask prevents that.
    before = os.umask(0o777 & ~mode)
    try:
        pynng.check_err(lib.nng_listener_start(listener.listener, 0))
    finally:
        os.umask(before)
    return listener


def _options(config: SocketConfig) -> dict[str, Any]:
    options: dict[str, Any] = {
        "async_backend": "asyncio",
        "recv_max_size": config.max_message_bytes,
        "reconnect_time_min": RECONNECT_MIN_MS,
        "reconnect_time_max": RECONNECT_MAX_MS,
    }
    if config.protocol not in _WITHOUT_RECEIVE_BUFFER:
        unread = config.protocol == "bus" and config.direction == "out"
        options["recv_buffer_size"] = 1 if unread else config.queue_messages
    if config.protocol not in _WITHOUT_SEND_BUFFER:
        options["send_buffer_size"] = config.queue_messages
    if config.protocol in ("rep", "req"):
        # A peer that does not read holds a context for no longer than this.
        options["send_timeout"] = int(config.timeout_s * 1000)
    if config.protocol == "req":
        # Never send a request again, so that it runs at most once. A lost peer is an error instead.
        options["resend_time"] = -1
        # ReqBridge has its own timeout, but pynng may swallow it while the request is sent.
        options["recv_timeout"] = int(config.timeout_s * 1000) + 1000
    elif config.protocol == "respondent":
        # Raw, because a respondent gives one response, but a cluster has as many answers as members.
        options["opener"] = pynng.lib.nng_respondent0_open_raw
    elif config.protocol == "surveyor":
        options["survey_time"] = int(config.timeout_s * 1000)
    elif config.protocol == "sub":
        options["topics"] = [prefix.encode() for prefix in config.prefixes]
    if config.uses_tls:
        options["tls_config"] = _tls(config)
    return options


def _bound(listener: Any, config: SocketConfig) -> str:
    """Return the address, with the port if nng chose it."""
    if config.scheme == "ipc":
        return config.address
    port = pynng.ffi.new("int *")
    if pynng.lib.nng_listener_get_int(listener.listener, b"tcp-bound-port", port):
        return config.address
    scheme, _, rest = config.address.partition("://")
    address, slash, path = rest.partition("/")
    return f"{scheme}://{address.rpartition(':')[0]}:{port[0]}{slash}{path}"


def _tls(config: SocketConfig) -> Any:
    def read(field: str) -> str | None:
        name = getattr(config, field)
        if name is None:
            return None
        try:
            if field == "tls_key":
                return read_secret(Path(name), group_reads=True)
            return Path(name).read_text(encoding="ascii")
        except KeyringError as err:
            raise ConfigError(f"{config.label}: {field}: {err}") from err
        except (OSError, ValueError) as err:
            raise ConfigError(f"{config.label}: {field}: {name}: {err}") from err

    cert, key, authority = read("tls_cert"), read("tls_key"), read("tls_ca")
    server = config.listen is not None
    host = config.address.partition("://")[2].partition("/")[0].rpartition(":")[0]
    try:
        return pynng.TLSConfig(
            pynng.TLSConfig.MODE_SERVER if server else pynng.TLSConfig.MODE_CLIENT,
            server_name=None if server else config.tls_server_name or host.strip("[]"),
            own_cert_string=cert,
            own_key_string=key,
            ca_string=authority,
            auth_mode=pynng.TLSConfig.AUTH_MODE_REQUIRED if authority else None,
        )
    except pynng.NNGException as err:
        raise ConfigError(
            f"{config.label}: tls_cert, tls_key or tls_ca was not accepted: {err}"
        ) from err
