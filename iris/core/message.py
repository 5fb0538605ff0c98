"""Messages as the application receives them, and conversion between values and payloads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar, overload

import msgpack  # type: ignore[import-untyped]  # it ships no types
import msgspec

from iris.core.bundle import Headers
from iris.errors import ConfigError, DecodeError, EncodeError
from iris.wire.names import plural

if TYPE_CHECKING:
    from typing_extensions import TypeForm

MEMBER_HEADER: Final = "iris-member"
"""Header of a survey's answer: the id of the member that sent it, sealed with it."""

T = TypeVar("T")


def _plain(value: object) -> object:
    """Return what an object that msgspec does not know is encoded as: a kind of int, such as an offset, as an int."""
    if isinstance(value, int):
        return int(value)
    raise _Unknown(value)


class _Unknown(TypeError):
    """An object, perhaps inside another one, cannot be encoded."""

    def __init__(self, value: object) -> None:
        super().__init__(f"it holds a value of type {type(value).__name__}")
        self.value = value


_encode: Final = msgspec.msgpack.Encoder(enc_hook=_plain).encode
_FIXES: Final = (
    ("model_dump", "send its model_dump(mode='json') instead"),  # Pydantic
    ("tolist", "send its tolist() instead"),  # NumPy, pandas
    ("to_dict", "send its to_dict() instead"),
)
"""Method of objects of other libraries -> what to do with them."""
_decoders: Final[dict[Any, msgspec.msgpack.Decoder[Any]]] = {}
_NIL: Final = b"\xc0"
_raw_modes: Final[dict[Any, type[bytes] | type[str] | None]] = {}
"""Type -> what `_raw_mode` returns for it."""
_MAX_DECODERS: Final = 256
"""Types that each of both tables keeps."""
_VALUES: Final[tuple[object, ...]] = (
    None, True, 0, 0.5, "", b"", [], {}, msgspec.msgpack.Ext(1, b""),
)  # fmt: skip
"""One of each kind of value that MessagePack decodes into."""


class Message(msgspec.Struct, gc=False):
    """A message as received. The receiver owns it.

    `payload` holds the bytes as sent, `name` the topic or cluster. `packed` means that the payload is MessagePack,
    because the sender passed an object. `source` is the sender's 16-byte id, new for each of its connections.
    """

    payload: bytes
    name: str
    headers: Headers | None = None
    packed: bool = False
    source: bytes = b""

    @property
    def method(self) -> str:
        """The method that was called; empty if none was named."""
        return ""

    @property
    def value(self) -> Any:
        """The payload: bytes if it was sent raw, else the decoded object."""
        return decode_payload(self.payload, self.packed, None)

    @overload
    def decode(self, type: type[T]) -> T: ...
    @overload
    def decode(self, type: TypeForm[T]) -> T: ...
    @overload
    def decode(self, type: Any) -> Any: ...
    def decode(self, type: Any) -> Any:
        """Return the payload as `type`: bytes, str, or any type that msgspec supports.

        Raises DecodeError if it does not match.
        """
        return decode_payload(self.payload, self.packed, type, "message")


class MethodMessage(Message, gc=False):
    """A request, push or survey that names a method."""

    method: str = ""


def encode_payload(value: object) -> tuple[bytes, bool]:
    """Return (bytes, packed): bytes and str are sent raw, anything else as MessagePack.

    Raises:
        EncodeError: msgspec cannot encode an object of this type, or the text holds surrogates.
    """
    if isinstance(value, bytes):
        return value, False
    if isinstance(value, (bytearray, memoryview)):
        return bytes(value), False
    try:
        return (value.encode(), False) if isinstance(value, str) else (_encode(value), True)
    except (TypeError, ValueError, OverflowError, RecursionError) as err:
        kind = type(value).__name__
        found = err.value if isinstance(err, _Unknown) else value
        why = "" if found is value and isinstance(err, _Unknown) else f" ({err})"
        fix = next((fix for name, fix in _FIXES if hasattr(found, name)), "send bytes instead")
        raise EncodeError(f"cannot encode a value of type {kind}{why}; {fix}") from err


def foreign_bytes(message: Message) -> bytes:
    """Return the payload for a program that does not know MessagePack as bytes: None is empty there."""
    return b"" if message.packed and message.payload == _NIL else message.payload


def _is_container(payload: bytes) -> bool:
    """Whether raw bytes may be an object that the sender encoded itself: a MessagePack map or array.

    Text is never taken for a number: "7" would be the number 55.
    """
    return bool(payload) and (0x80 <= payload[0] <= 0x9F or 0xDC <= payload[0] <= 0xDF)


def _raw_mode(wanted: Any) -> type[bytes] | type[str] | None:
    """Return as what bytes or text that were sent raw are converted into a type, or None if it can be neither."""
    if wanted in _raw_modes:
        return _raw_modes[wanted]
    try:
        mode = _raw_mode_of(msgspec.inspect.type_info(wanted))
    except NameError as err:
        raise TypeError(str(err)) from err
    if len(_raw_modes) < _MAX_DECODERS:
        _raw_modes[wanted] = mode
    return mode


def _raw_mode_of(info: msgspec.inspect.Type) -> type[bytes] | type[str] | None:
    match info:
        case msgspec.inspect.BytesType() | msgspec.inspect.AnyType():
            return bytes
        case msgspec.inspect.StrType():
            return str
        case msgspec.inspect.LiteralType(values=values):
            return str if any(isinstance(each, str) for each in values) else None
        case msgspec.inspect.EnumType(cls=cls):
            return str if any(isinstance(each.value, str) for each in cls) else None
        case msgspec.inspect.Metadata(type=inner):
            return _raw_mode_of(inner)
        case msgspec.inspect.UnionType(types=types):
            modes = {_raw_mode_of(each) for each in types}
            return bytes if bytes in modes else str if str in modes else None
    return None


def _is_text(payload: bytes) -> bool:
    try:
        payload.decode()
    except UnicodeDecodeError:
        return False
    return True


def check_decodable(wanted: Any) -> None:
    """Raise ConfigError if no payload can be decoded into the type `wanted`, whatever is sent."""
    try:
        if wanted in _decoders:
            return
    except TypeError:  # it has no hash, so its decoder cannot be kept
        raise ConfigError(
            f"a payload cannot be decoded as {wanted}, which is not hashable"
        ) from None
    shown = getattr(wanted, "__name__", wanted)
    use = "use a msgspec.Struct, a dataclass, a TypedDict or builtin types"
    try:
        decoder = msgspec.msgpack.Decoder(wanted)
        custom = _undecodable(msgspec.inspect.type_info(wanted))
    except (TypeError, NameError) as err:
        raise ConfigError(f"a payload cannot be decoded as {shown}: {err}; {use}") from err
    if custom is not None:
        what = "" if custom is wanted else f", because of {custom.__name__}"
        raise ConfigError(f"a payload cannot be decoded as {shown}{what}; {use}")
    if len(_decoders) < _MAX_DECODERS:
        _decoders[wanted] = decoder


def _undecodable(info: msgspec.inspect.Type) -> type | None:
    """Return a class in the type that msgspec can only check, if no value that it decodes belongs to the class."""
    match info:
        case msgspec.inspect.CustomType(cls=cls):
            return None if _belongs(cls) else cls
        case msgspec.inspect.UnionType(types=inner) | msgspec.inspect.TupleType(item_types=inner):
            pass
        case msgspec.inspect.DictType(key_type=key, value_type=value):
            inner = (key, value)
        case msgspec.inspect.CollectionType(item_type=item):
            inner = (item,)
        case _:
            return None
    return next((found for each in inner if (found := _undecodable(each)) is not None), None)


def _belongs(cls: type) -> bool:
    try:
        return any(isinstance(value, cls) for value in _VALUES)
    except TypeError:  # such as a protocol, which msgspec cannot check either
        return False


def decode_payload(
    payload: bytes, packed: bool, wanted: Any, role: Literal["argument", "message", "reply"] = "argument"
) -> Any:  # fmt: skip
    """Return `payload` as the type `wanted`. None means bytes if it was sent raw, else the decoded object.

    The error's text depends on the `role` of the payload: the argument of a handler, a message that was received, or a
    reply.

    Raises:
        DecodeError: the payload does not match the type.
    """
    if wanted is bytes or (wanted is None and not packed):
        return payload
    told = packed
    """Whether the error of the decoder says what is wrong."""
    try:
        if wanted is None:
            return msgpack.unpackb(payload, timestamp=3, strict_map_key=False)
        if not packed:
            if wanted is str:
                return payload.decode()
            told = (raw := _raw_mode(wanted)) is not None
            if raw is bytes:
                return msgspec.convert(payload, wanted)
            if not _is_container(payload):
                if raw is None:
                    raise ValueError("it is bytes or text")
                return msgspec.convert(payload.decode(), wanted)
            if raw is str and _is_text(payload):
                return msgspec.convert(payload.decode(), wanted)
        decoder = _decoders.get(wanted)
        if decoder is None:
            decoder = msgspec.msgpack.Decoder(wanted)
            if len(_decoders) < _MAX_DECODERS:
                _decoders[wanted] = decoder
        return decoder.decode(payload)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as err:
        shown = getattr(wanted, "__name__", wanted) if wanted is not None else "MessagePack"
        size = plural(len(payload), "byte")
        what = f"the reply of {size}" if role == "reply" else f"a payload of {size}"
        if told or wanted is str:
            raise DecodeError(f"{what} does not decode as {shown}: {err}") from err
        if role == "reply":
            text = f"{what} is text or bytes, not {shown}; use type=str or type=bytes"
        else:
            fix = "annotate the parameter as" if role == "argument" else "decode it as"
            text = (
                f"{what} was sent as bytes or text, not as {shown}; send an object (on the command line with --pack), "
                f"or {fix} str or bytes"
            )
        raise DecodeError(text) from err
