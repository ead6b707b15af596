"""What of a state is the same on all ranks, and what each rank has of its own."""

from __future__ import annotations

import json
from collections.abc import Sequence

import attrs
import xxhash

from hookbus.checkpoint import Part, Section, take_bytes
from hookbus.errors import SaveError
from hookbus.ranks import Ranks

PLACE = "comparing what is saved"
_Key = tuple[str, str | None]


def settle(ranks: Ranks, sections: Sequence[Section]) -> list[Section]:
    """Decide what each rank writes, and leave the rest out; what is everybody's is rank 0's.

    Parts that must be the same on all ranks are compared by hashes, on every rank at once, before
    anything is copied or written. Of a part with sharded tensors every rank has its pieces, and
    what is not sharded is compared.

    Raises:
        RankError: the ranks have other sections.
        SaveError: replicas differ; section and tensor are named, on all ranks.
    """
    parts = {(each.name, name): part for each in sections for name, part in each.parts.items()}
    ranks.agree(
        PLACE,
        {
            f"section {each.name!r}": [
                each.plugin,
                [_describe(*pair) for pair in each.parts.items()],
            ]
            for each in sections
        },
    )
    compared = {key: part for key, part in parts.items() if not part.per_rank}
    hashes = {key: _hash(part) for key, part in compared.items()}
    digests = [_join(each) for each in hashes.values()]
    differing = [
        key
        for key, told in zip(compared, zip(*ranks.gather(PLACE, digests), strict=True), strict=True)
        if len(set(told)) > 1
    ]
    strict = [k for k in differing if compared[k].per_rank is False or compared[k].is_sharded]
    if strict:
        told = ranks.gather(f"{PLACE}: what differs", {key: hashes[key] for key in strict})
        with ranks.together(PLACE):
            raise SaveError("; ".join(_tell(key, [each[key] for each in told]) for key in strict))
    own = {key for key, part in parts.items() if part.per_rank} | {*differing}
    return [
        attrs.evolve(
            each,
            parts={
                name: attrs.evolve(part, per_rank=(each.name, name) in own)
                for name, part in each.parts.items()
                if ranks.is_first or part.is_sharded or (each.name, name) in own
            },
        )
        for each in sections
    ]


def _describe(name: str | None, part: Part) -> list[object]:
    return [name, part.version, part.per_rank, sorted(part.uncompared), [*part.flat.cuts]]


def _hash(part: Part) -> dict[str, str]:
    """Return the hash of the plain values, and of each tensor by name."""
    hashes = {"": xxhash.xxh3_128_hexdigest(json.dumps(part.flat.tree).encode())}
    for name, tensor in part.flat.tensors.items():
        cut = part.flat.cuts.get(name)
        if name not in part.uncompared:
            shape = tuple(tensor.shape) if cut is None else cut.shape
            digest = xxhash.xxh3_128(f"{tensor.dtype} {shape}".encode())
            digest.update(take_bytes(tensor) if cut is None else b"")
            hashes[name] = digest.hexdigest()
    return hashes


def _join(hashes: dict[str, str]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(hashes).encode())


def _tell(key: _Key, told: Sequence[dict[str, str]]) -> str:
    section, part = key
    names = dict.fromkeys(name for each in told for name in each)
    differing = [name for name in names if len({each.get(name) for each in told}) > 1]
    shown = ", ".join(name or "the plain values" for name in differing[:5])
    more = f" and {len(differing) - 5} more" if differing[5:] else ""
    strange = [rank for rank, each in enumerate(told) if each != told[0]]
    where = section if part is None else f"{section}, part {part}"
    return (
        f"section {where}: {shown}{more} of rank {', '.join(map(str, strange[:4]))} differ from"
        " those of rank 0, so the replicas are not the same any more, and nothing was saved; what"
        " each process has of its own is written with save.write(state, per_rank=True)"
    )
