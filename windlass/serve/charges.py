"""Charges ended requests: to the costs of their key, the usage of their tenant, and its limits."""

from __future__ import annotations

from windlass.core.trace import RequestTrace
from windlass.serve.cost import LiveCosts
from windlass.serve.tenant_limits import TenantLimits
from windlass.serve.trace_store import Entry
from windlass.serve.usage import Numbers, UsageKey, UsageStore

_FIRST_BEAM = "-0-0"  # in the ids of beam search (text/beam_search.py): its round and its beam


class Charges:
    """Gets the trace of every ended request, in the server's process."""

    def __init__(
        self,
        costs: LiveCosts,
        usage: UsageStore | None,
        limits: TenantLimits,
        *,
        model: str,
    ) -> None:
        self._costs = costs
        self._usage = usage
        self._limits = limits
        self._model = model

    def charge(self, entry: Entry | None, trace: RequestTrace, name: str) -> None:
        """Charge a request, or a round of the beam search `name`; None: the server's own probes."""
        self._costs.charge("" if entry is None else entry.owner, trace)
        if entry is None:
            return
        numbers = self._numbers(entry, trace, name)
        self._limits.charge(entry.owner, numbers.prompt_tokens + numbers.output_tokens)
        if self._usage is not None:
            model = entry.adapter or entry.fallback_model or self._model
            self._usage.add(UsageKey(entry.owner, entry.key_id, model), numbers)

    def _numbers(self, entry: Entry, trace: RequestTrace, name: str) -> Numbers:
        """The usage of one completion, as the response's usage counts it."""
        times, tracker = trace.timeline, self._costs.tracker
        beam = trace.request_id.removeprefix(name)
        if beam:
            has_prompt = beam == _FIRST_BEAM
        else:
            has_prompt = int(name.rpartition("-")[2]) % entry.num_per_prompt == 0
        return Numbers(
            requests=int(has_prompt and name == entry.request_ids[0]),
            prompt_tokens=times.num_prompt if has_prompt else 0,
            cached_tokens=times.num_cached if has_prompt else 0,
            output_tokens=times.num_output,
            usd=0.0 if tracker is None else tracker.price.of([trace]).total,
        )
