"""What families share whose layers are recurrent or have attention."""

from __future__ import annotations

from windlass.errors import CheckpointError, UnsupportedError
from windlass.models.fields import Fields


def listed_layers(
    fields: Fields,
    recurrent: tuple[str, ...],
    attention: tuple[str, ...],
    name: str = "layer_types",
) -> tuple[bool, ...] | None:
    """Whether each layer is recurrent, from the kinds in a list; None if the config has no such list."""
    kinds, layers = fields.sequence(name), fields.positive_int("num_hidden_layers")
    if kinds is None:
        return None
    unknown = {str(kind) for kind in kinds} - {*recurrent, *attention}
    if unknown:
        raise UnsupportedError(
            f"{fields.source}: {name} contains {', '.join(sorted(unknown))}; supported are "
            f"{', '.join((*recurrent, *attention))}."
        )
    if len(kinds) != layers:
        raise CheckpointError(
            f"{fields.source}: {name} has {len(kinds)} layers, num_hidden_layers is {layers}."
        )
    return tuple(kind in recurrent for kind in kinds)
