"""A bucket of a service in the cloud, through obstore."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

from iris.errors import ConfigError
from iris.extras import install_line
from relay.store.bucket.objects import FIRST_BYTES, BucketError, time_for

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MOST_S: Final = 3600
"""More than any request may take: obstore's own limit, which does not know how large an object is."""
_TOOK: Final = re.compile(r" in [0-9.]+[nµm]?s\b")
"""The time that a request took, in texts of obstore: an error that is the same should read the same."""
_WHERE: Final = re.compile(r"(https?://[^/\s]+)/\S*")
"""The address of an object, whose key the error names already."""
_DENIED: Final = re.compile(
    r"status code: 40[13]\b|necessary privileges|not authenticated|Unauthenticated", re.I
)
_PAST_THE_END: Final = re.compile(r"status code: 416\b|Wanted range starting at")
"""A range that begins where the object ends, or later: the service refuses it, or obstore misses its bytes."""
_XML: Final = re.compile(r"<(?:\?xml|Error)\b.*", re.DOTALL)
_SAID: Final = re.compile(r"<(?:Code|Message)>([^<\n]{1,200})")
"""What a service says of an error, in XML."""
_NO_BUCKET: Final = re.compile(r"<Code>(?:NoSuchBucket|ContainerNotFound)<")
_CAUSE: Final = re.compile(r'(?:message|error): "([^"]{1,200})"')
"""The system's words in obstore's debug output, such as "Connection refused"."""


class Cloud:
    """A bucket of Amazon S3, Google Cloud Storage or Azure, or of a service that speaks their protocol."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self._store = store

    async def create(self, key: str, data: bytes) -> bool:
        import obstore
        from obstore.exceptions import AlreadyExistsError, PreconditionError

        try:
            async with time_for(len(data)):
                await obstore.put_async(self._store, key, data, mode="create", use_multipart=False)
        except (AlreadyExistsError, PreconditionError) as err:
            # Older versions of obstore raise the latter for Azure. S3 also refuses a create if it meets another request
            # for the object. Nothing was created then, and obstore reports that alike:
            # https://docs.aws.amazon.com/AmazonS3/latest/userguide/conditional-writes.html
            if await self.exists(key):
                return False
            raise BucketError(
                f"bucket {self.url}: {key}: the service did not create it, because it met another request for it; "
                "it can be repeated"
            ) from err
        except Exception as err:  # obstore raises OSError, TimeoutError and its own, by service
            raise self._failed(key, err) from err
        return True

    async def get(self, key: str) -> bytes | None:
        return await self.get_range(key, 0, FIRST_BYTES)

    async def get_range(self, key: str, start: int, end: int) -> bytes | None:
        import obstore

        if start >= end:  # which obstore refuses
            return b"" if await self.exists(key) else None
        try:
            async with time_for(end - start):
                return bytes(await obstore.get_range_async(self._store, key, start=start, end=end))
        except FileNotFoundError as err:
            self._check_bucket(key, err)
            return None
        except Exception as err:
            if _PAST_THE_END.search(str(err)):
                return b""
            raise self._failed(key, err) from err

    async def exists(self, key: str) -> bool:
        # Not by HEAD: its answer has no body, so it does not tell whether the object is missing or the whole bucket.
        return await self.get_range(key, 0, 1) is not None

    async def delete(self, key: str) -> None:
        import obstore

        try:
            async with time_for(0):
                await obstore.delete_async(self._store, key)
        except FileNotFoundError as err:
            self._check_bucket(key, err)
        except Exception as err:
            raise self._failed(key, err) from err

    def _check_bucket(self, key: str, err: FileNotFoundError) -> None:
        """Raise BucketError if the whole bucket is missing, not only the object."""
        if _NO_BUCKET.search(str(err)):
            raise self._failed(key, err) from err

    def _failed(self, key: str, err: Exception) -> BucketError:
        return BucketError(f"bucket {self.url}: {key}: {error_line(err)}")


def open_cloud(url: str, *, is_s3: bool) -> Cloud:
    """Return the bucket of a service. The service is not called yet.

    Raises ConfigError if `obstore` is not installed, or its settings in the environment are not complete.
    """
    try:
        from obstore.exceptions import UnknownConfigurationKeyError
        from obstore.store import from_url
    except ModuleNotFoundError as err:
        if err.name != "obstore":
            raise
        raise ConfigError(
            f"bucket: object storage requires obstore; install it with: {install_line('bucket')}"
        ) from err
    try:
        settings: dict[str, Any] = {
            "client_options": {"timeout": f"{MOST_S}s", "allow_http": True},
            # Retries are ours: obstore would repeat a create whose answer was lost, and call it refused.
            "retry_config": {"max_retries": 0},
        }
        # Not every service with S3's protocol knows the request that deletes many objects, which obstore uses for one.
        single: dict[str, Any] = {"config": {"disable_bulk_delete": "true"}} if is_s3 else {}
        try:
            store = from_url(url, **settings, **single)
        except UnknownConfigurationKeyError:  # older versions of obstore
            store = from_url(url, **settings)
    except Exception as err:
        raise ConfigError(
            f"bucket: {url}: {error_line(err)}; check the URL, and the settings in the environment, such as AZURE_STORAGE_ACCOUNT_NAME"
        ) from err
    return Cloud(url, store)


def error_line(err: Exception) -> str:
    """Return what an error of obstore says, in one line: its first, and the system's words from its debug output.

    Of an answer in XML, only the code and the message are kept.
    """
    text, _, debug = str(err).strip().partition("\n\nDebug source:")
    said = ": ".join(_SAID.findall(text))
    first = _XML.sub(said, text, count=1).partition("\n")[0].rstrip(": ")
    line = _WHERE.sub(r"\1", _TOOK.sub("", first))[:400] or type(err).__name__
    if _DENIED.search(first):
        return f"{line}; check the credentials of this store, and what they may do in the bucket"
    causes = _CAUSE.findall(debug)
    return f"{line} ({causes[-1]})" if causes and causes[-1] not in line else line
