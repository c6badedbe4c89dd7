"""Joins an engine to others that read the KV blocks it writes, or write those it reads.

Engines of one server share memory; engines of different hosts send blocks over TCP. Which engine is
which, start.py decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from windlass.engine import EnginePeers
from windlass.parallel.segment import Segment
from windlass.tiers.fingerprint import digest_of
from windlass.tiers.peer import FINGERPRINT_BYTES, LocalSource, PeerExport, PeerStore, RecordRing

if TYPE_CHECKING:
    from windlass.runner.kv_tiers import KVTiers


@dataclass(frozen=True, slots=True)
class SharedRings:
    """Memory of one server in which replica `index` writes or reads KV blocks."""

    index: int
    rings: Mapping[int, Segment]  # by the replica that writes


@dataclass(frozen=True, slots=True)
class RemotePeers:
    """How a prefill engine and decode engines on other hosts exchange KV blocks."""

    ring: Segment | None  # the memory that a prefill engine writes; None: a decode engine reads
    secret: bytes = field(repr=False)  # of the cluster


def join_replicas(shared: SharedRings, tiers: KVTiers, record_bytes: int) -> EnginePeers:
    """Add the store between prefill and decode engines of one server to the tiers."""
    fingerprint = bytes(FINGERPRINT_BYTES)  # all replicas have one config
    rings = {str(index): RecordRing(ring.map) for index, ring in shared.rings.items()}
    own = str(shared.index)
    if own in rings:
        export = PeerExport(
            rings[own], source=own, record_bytes=record_bytes, fingerprint=fingerprint
        )
        tiers.share(export)
        return EnginePeers(export=export)
    sources = {name: LocalSource(ring, fingerprint) for name, ring in rings.items()}
    imports = PeerStore(sources, record_bytes=record_bytes)
    tiers.share(imports)
    return EnginePeers(imports=imports)


def join_hosts(
    shared: RemotePeers,
    tiers: KVTiers,
    *,
    record_bytes: int,
    facts: dict[str, str],
    limit_s: float,
) -> EnginePeers:
    """Add the store between this engine and those of other hosts to the tiers.

    `facts`: must be the same on both hosts. `limit_s`: of one transfer.
    """
    from windlass.handshake import Identity
    from windlass.tiers.peer_link import RemoteSource  # needs msgspec, as only the server does

    if shared.ring is not None:
        export = PeerExport(
            RecordRing(shared.ring.map),
            source="",  # the decode server names it by its address
            record_bytes=record_bytes,
            fingerprint=digest_of(facts),
        )
        tiers.share(export)
        return EnginePeers(export=export)
    imports = PeerStore(
        {},
        record_bytes=record_bytes,
        connect=partial(RemoteSource, identity=Identity(facts, shared.secret)),
        limit_s=limit_s,
    )
    tiers.share(imports)
    return EnginePeers(imports=imports)
