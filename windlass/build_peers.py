"""Joins an engine to others that read the KV blocks it writes, or write those it reads.

Engines of one server share memory; engines of different hosts send blocks over TCP. Which engine is
which, start.py decides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from windlass.engine import EnginePeers
from windlass.parallel.segment import Segment
from windlass.tiers.fingerprint import digest_of
from windlass.tiers.peer import FINGERPRINT_BYTES, LocalSource, PeerExport, PeerStore, RecordRing

if TYPE_CHECKING:
    from windlass.runner.kv_tiers import KVTiers
    from windlass.runner.worker import Followers


Peer = PeerExport | PeerStore


@dataclass(frozen=True, slots=True)
class SharedRings:
    """Memory of one server in which replica `index` writes or reads KV blocks."""

    index: int
    rings: Mapping[int, Sequence[Segment]]  # by the replica that writes: of each of its ranks


@dataclass(frozen=True, slots=True)
class RemotePeers:
    """How a prefill engine and decode engines on other hosts exchange KV blocks."""

    rings: Sequence[Segment]  # memory that each rank of a prefill engine writes; none: it reads
    secret: bytes = field(repr=False)  # of the cluster


def join_replicas(shared: SharedRings, rank: int, record_bytes: int) -> Peer:
    """The store between this rank and those of other replicas of the server."""
    fingerprint = bytes(FINGERPRINT_BYTES)  # all replicas have one config
    rings = {str(index): RecordRing(found[rank].map) for index, found in shared.rings.items()}
    own = str(shared.index)
    if own in rings:
        return PeerExport(
            rings[own], source=own, record_bytes=record_bytes, fingerprint=fingerprint
        )
    sources = {name: LocalSource(ring, fingerprint) for name, ring in rings.items()}
    return PeerStore(sources, record_bytes=record_bytes)


def join_hosts(
    shared: RemotePeers, rank: int, *, record_bytes: int, facts: dict[str, str], limit_s: float
) -> Peer:
    """The store between this rank and those of engines on other hosts.

    `facts`: must be the same on both hosts. `limit_s`: of one transfer.
    """
    from windlass.handshake import Identity
    from windlass.tiers.peer_link import RemoteSource  # needs msgspec, as only the server does

    if shared.rings:
        return PeerExport(
            RecordRing(shared.rings[rank].map),
            source="",  # the decode server names it by its address
            record_bytes=record_bytes,
            fingerprint=digest_of(facts),
        )
    return PeerStore(
        {},
        record_bytes=record_bytes,
        connect=partial(RemoteSource, identity=Identity(facts, shared.secret), rank=rank),
        limit_s=limit_s,
    )


def engine_peers(
    peer: Peer | None, tiers: KVTiers | None, followers: Followers | None
) -> EnginePeers:
    """The store of rank 0 as the engine uses it: for all of its ranks."""
    if peer is None or tiers is None:
        return EnginePeers()
    if followers is None:
        return EnginePeers(peer) if isinstance(peer, PeerExport) else EnginePeers(imports=peer)
    from windlass.tiers.peer_ranks import RankedExport, RankedImport  # needs msgspec

    if isinstance(peer, PeerExport):
        return EnginePeers(RankedExport(peer, tiers, followers))
    return EnginePeers(imports=RankedImport(peer, tiers, followers))
