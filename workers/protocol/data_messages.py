"""Messages of the data plane: the contents of data stores, and the connections between pools."""

from typing import Annotated, Any, ClassVar

from msgspec import Meta

from ..data_plane.plan import Column, CurveKeySet
from .messages import Count, Reply, Request


class Put(Request, kw_only=True):
    """Store samples.

    Args:
        ids: The samples.
        lengths: The number of tokens of each.
        columns: The columns.
        tensors: Their rows, in the same order.
    """

    values: ClassVar[tuple[str, ...]] = ("tensors",)

    ids: list[str]
    lengths: list[Count]
    columns: list[Column]
    tensors: Any = None


class PutOk(Reply):
    """The reply to `put`."""


class Get(Request, kw_only=True):
    """Request columns of samples.

    Args:
        ids: The samples.
        keys: The columns.
    """

    ids: list[str]
    keys: list[str]


class GetOk(Reply, kw_only=True):
    """The reply to `get`.

    Args:
        columns: The columns.
        tensors: Their rows, in the same order.
    """

    values: ClassVar[tuple[str, ...]] = ("tensors",)

    columns: list[Column]
    tensors: Any = None


class Digest(Request, kw_only=True):
    """Request a digest of columns of samples, for comparing processes that should hold the same data.

    Args:
        ids: The samples.
        keys: The columns.
    """

    ids: list[str]
    keys: list[str]


class DigestOk(Reply, kw_only=True):
    """The reply to `digest`.

    Args:
        digest: SHA-256 of the types and bytes of the columns, in hexadecimal digits.
    """

    digest: str


class Fetch(Request, kw_only=True):
    """Load this rank's data-parallel share of the next samples of a role's data set.

    Args:
        role: The role.
        count: The number of samples, over all shares.
        start: The position of the first one, counted over epochs; null continues after the last fetch.
    """

    role: str
    count: Count
    start: Count | None = None


class FetchOk(Reply, kw_only=True):
    """The reply to `fetch`: metadata of the samples that this rank has loaded and keeps.

    Args:
        ids: The samples; the ids contain the position: `role:epoch:index`.
        lengths: The number of tokens of each.
        positions: The position of each.
        fields: The fields, with their columns.
        group_ids: The group of each sample; null if each is its own group.
        end: The position after the last sample of all shares.
    """

    ids: list[str]
    lengths: list[Count]
    positions: list[Count]
    fields: dict[str, Column]
    group_ids: list[int] | None = None
    end: Count = 0


class Spec(Request, kw_only=True):
    """Request the size of a role's data set."""

    role: str


class SpecOk(Reply, kw_only=True):
    """The reply to `spec`.

    Args:
        samples: The number of samples of an epoch, over all shares.
        shard: The number of those that this rank loads in the first epoch; 0 on ranks that are not output ranks.
        position: The position after the last fetch, counted over epochs.
    """

    samples: Count
    shard: Count
    position: Count = 0


class ModelConfigRequest(Request, kw_only=True, tag="model_config"):
    """Request the configuration of a role's model."""

    role: str


class ModelConfigOk(Reply, kw_only=True):
    """The reply to `model_config`.

    Args:
        config_json: The text of the model's config.json.
    """

    config_json: str


class ClearDataCache(Request, kw_only=True):
    """Drop samples from the data store.

    The cache of the device's allocator keeps their memory for the next samples.

    Args:
        ids: The samples. Samples that pending requests need are dropped after these have run.
        keys: The columns to drop; empty for entire samples.
    """

    ids: list[str]
    keys: list[str] = []


class ClearDataCacheOk(Reply, kw_only=True):
    """The reply to `clear_data_cache`.

    Args:
        dropped: The number of samples that were present and have been dropped.
        deferred: The number of samples that pending requests still need.
        samples: The number of remaining samples.
        bytes_held: Their memory in bytes.
    """

    dropped: Count
    deferred: Count
    samples: Count
    bytes_held: Count


class Listen(Request, kw_only=True):
    """Open a socket for the data of other pools.

    Args:
        endpoint: Where to listen: `ipc:///folder/file`, or `tcp://host:*`.
        keys: The CURVE keys of the group; null for a socket of this machine.
        incarnation: How many times a worker of this id has been started in this group.
    """

    endpoint: str
    keys: CurveKeySet | None = None
    incarnation: Annotated[int, Meta(ge=1)] = 1


class Listening(Reply, kw_only=True):
    """The reply to `listen`.

    Args:
        address: The address that others connect to.
    """

    address: str


class Peers(Request, kw_only=True):
    """Announce the sockets of all workers.

    Args:
        addresses: The address of each worker, by `pool/rank`.
        incarnations: How many times each has been started, by `pool/rank`; once if missing. Data in flight to or from a restarted
            worker is dropped.
    """

    addresses: dict[str, str]
    incarnations: dict[str, int] = {}


class PeersOk(Reply):
    """The reply to `peers`."""
