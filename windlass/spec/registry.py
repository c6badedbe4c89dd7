"""Which file a proposer's name means. A new one is its file and a line here."""

from __future__ import annotations

from importlib import import_module

from windlass.spec.base import Guide, Site

# Functions from a Site to a Guide.
_GUIDES = {
    "ngram": "windlass.spec.ngram:guide",
    "lookahead": "windlass.spec.lookahead:guide",
    "medusa": "windlass.spec.medusa:guide",
    "eagle": "windlass.spec.eagle:guide",
}


def open_guide(site: Site) -> Guide:
    """Load what the wanted proposer needs; one that does not fit the model is refused here."""
    module, name = _GUIDES[site.config.speculation.spec].split(":")
    return getattr(import_module(module), name)(site)
