"""Fair share between tenants: counts what each was served, and decides which comes first.

The counters follow VTC (Sheng et al., "Fairness in Serving Large Language Models"). A tenant's
counter grows by the cost of its computed tokens over its weight, and the queue takes the tenant
with the smallest counter. When a tenant without queued requests queues one, its counter is raised
to the smallest counter of the queued tenants, less one step: idle time earns no more credit than a
short burst needs. While a single tenant uses the engine, nothing is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from heapq import nsmallest

from windlass.core.request import Request
from windlass.core.tenant_account import TenantAccount
from windlass.core.types import BATCH_PRIORITY, PROBE_PRIORITY, NewRequest, Row, RowResult

# A generated token takes more of a step than a prompt token; a cached one takes nothing.
PROMPT_COST = 1.0
OUTPUT_COST = 2.0
# Under every policy, health probes run before and batch requests after the requests of all tenants.
CLASSES = {PROBE_PRIORITY: -1, BATCH_PRIORITY: 1}

_RECENT_S = 60.0  # how long an idle tenant is remembered
_TICK_S = 10.0
_DECAY = 0.85  # per tick, of the measured service: a window of about a minute
_NEW_PROMPT = 1 / 8  # weight of the last prompt in a tenant's mean
_MIN_CHUNK = (
    256  # prompt tokens that a tenant may always have in a step: fewer would waste the device
)


class FairShare:
    """Owns the accounts of the tenants that had a request in the last minute.

    Without `enabled` it only measures.
    """

    def __init__(self, budget: int, enabled: bool = True) -> None:
        self.min_chunk = min(_MIN_CHUNK, max(1, budget // 16))
        self._credit = PROMPT_COST * budget  # credit of an idle tenant: a short burst goes first
        self.enabled = enabled
        self._accounts: dict[str, TenantAccount] = {}
        self._probes = TenantAccount("")
        self._last: TenantAccount | None = None  # the tenant whose request started last
        self._next_tick = 0.0
        self._active: list[TenantAccount] = []  # those with requests
        self._total_weight = 1.0  # of those
        self._shortest: list[tuple[float, TenantAccount]] = []  # the two shortest mean prompts
        self._contenders: set[TenantAccount] = set()  # of this step
        self.measures = False  # whether there are several tenants
        self.several = False  # whether they share the engine by weight
        self.is_unsorted = False  # whether to sort the running requests

    # ---- requests ----------------------------------------------------------------------------

    def enter(self, new: NewRequest, head: Request | None, now: float) -> TenantAccount:
        """Count a queued request, and return its tenant's account. `head`: the first queued request."""
        if new.priority == PROBE_PRIORITY:
            return self._probes
        account = self._accounts.get(new.tenant)
        if account is None:
            account = self._accounts[new.tenant] = TenantAccount(new.tenant, -self._credit)
            account.last_seen = now
            self._forget_old(now)
        account.weight = new.weight
        if not account.num_waiting:
            # Without a queue, compare with the tenant that started last, as VTC does.
            first = self._last if head is None or head.account is self._probes else head.account
            if first is not None:
                account.counter = max(account.counter, first.counter - self._credit / new.weight)
        account.num_requests += 1
        return account

    def start(self, request: Request, num_computed: int) -> None:
        """Note an admission; the request computes `num_computed` tokens for its first output."""
        account = request.account
        account.num_running += 1
        if account is not self._probes:
            self._last = account
            if request.timeline.num_preemptions == 0:
                rate = _NEW_PROMPT if account.mean_prompt else 1.0
                account.mean_prompt += rate * (num_computed - account.mean_prompt)

    def stop(self, request: Request) -> None:
        """Note a preemption or the end of a running request."""
        request.account.num_running -= 1

    def leave(self, request: Request) -> None:
        """Note the end of a request that does not run."""
        if request.account is not self._probes:
            request.account.num_requests -= 1

    # ---- time --------------------------------------------------------------------------------

    def begin_plan(self, now: float) -> None:
        """Forget tenants that left, and note which have queued requests."""
        if now >= self._next_tick:
            self._next_tick = now + _TICK_S
            for account in self._accounts.values():
                account.service *= _DECAY
                account.contended *= _DECAY
            self._forget_old(now)
        accounts = self._accounts.values()
        self._active = [each for each in accounts if each.num_requests]
        self._total_weight = sum(each.weight for each in self._active)
        means = ((each.mean_prompt, each) for each in accounts if each.mean_prompt)
        self._shortest = nsmallest(2, means, key=lambda pair: pair[0])
        queued = [account for account in accounts if account.num_waiting]
        self._contenders = set(queued) if len(queued) > 1 else set()
        for account in self._contenders:
            account.contended += 1

    def _forget_old(self, now: float) -> None:
        for name, account in list(self._accounts.items()):
            if account.num_requests:
                account.last_seen = now
            elif now - account.last_seen > _RECENT_S:
                del self._accounts[name]
        if len(self._accounts) > 1 and not self.measures:
            for account in self._accounts.values():
                if account.num_running:  # it was served, and nothing was counted
                    account.counter += self._credit / account.weight
        self.measures = len(self._accounts) > 1
        if self.several != (self.measures and self.enabled):
            self.several = not self.several
            self.is_unsorted = True

    # ---- service -----------------------------------------------------------------------------

    def charge(self, account: TenantAccount, cost: float) -> None:
        account.counter += cost / account.weight
        if account in self._contenders:
            account.service += cost / account.weight

    def charge_rows(self, members: Sequence[tuple[Request, int]], rows: Sequence[Row]) -> None:
        """Charge the rows of running requests, without those that verify draft tokens."""
        counts: dict[TenantAccount, int] = {}
        for (request, _), row in zip(members, rows, strict=True):
            if row.num_tokens > 1:
                self.charge_chunk(request, row.start)
            else:
                counts[request.account] = counts.get(request.account, 0) + 1
        for account, count in counts.items():
            self.charge(account, OUTPUT_COST * count)

    def charge_drafts(
        self,
        members: Sequence[tuple[Request, int]],
        rows: Sequence[Row],
        results: Sequence[RowResult],
    ) -> None:
        """Charge the generated tokens of rows that verified draft tokens."""
        for (request, _), row, result in zip(members, rows, results, strict=True):
            if row.num_drafts:
                self.charge(request.account, OUTPUT_COST * len(result.tokens))

    def charge_chunk(self, request: Request, start: int) -> None:
        """Charge the planned tokens from `start` on.

        Prompt tokens that are computed again after a preemption are free.
        """
        end = min(request.planned, request.num_prompt)
        num_prompt = max(0, end - max(start, request.num_charged))
        request.num_charged += num_prompt
        cost = PROMPT_COST * num_prompt + (0.0 if request.num_left else OUTPUT_COST)
        self.charge(request.account, cost)

    def jain(self) -> float:
        """Jain's index of the service per step of tenants that had queued requests; 1: all equal."""
        rates = [
            each.service / each.contended for each in self._accounts.values() if each.contended
        ]
        squares = sum(rate * rate for rate in rates)
        return sum(rates) ** 2 / (len(rates) * squares) if squares else 1.0

    # ---- shares ------------------------------------------------------------------------------

    def max_step_tokens(self, account: TenantAccount) -> int:
        """Tokens of a step up to which `account` may add a prompt to it.

        The limit is half of the shortest mean prompt of the other tenants: one of their requests that
        arrives during the step then waits half as long for its end as its own prompt takes. The tenant
        that was served the least and has the fewest requests has no limit.
        """
        shortest = [mean for mean, other in self._shortest if other is not account]
        if not shortest or self._is_lightest(account):
            return 2**31
        return max(self.min_chunk, int(shortest[0] / 2))

    def _is_lightest(self, account: TenantAccount) -> bool:
        others = [other for other in self._active if other is not account]
        load = account.num_requests / account.weight
        return bool(others) and all(
            other.counter > account.counter and other.num_requests / other.weight > load
            for other in others
        )

    def share(self, account: TenantAccount) -> float:
        """The account's share of the engine, 0 to 1, among tenants with requests."""
        return account.weight / self._total_weight

    def victims(
        self,
        running: Sequence[Request],
        claimant: TenantAccount,
        *,
        size: Callable[[Request], float],
        total: float,
        wanted: float,
    ) -> list[Request]:
        """The requests to preempt for `claimant`, which together hold `wanted` of a resource.

        They belong to tenants that hold more than their share of its `total` and were served more
        than the claimant. A tenant keeps one running request. The list may hold less than `wanted`.
        """
        held: dict[TenantAccount, float] = {}
        num_running: dict[TenantAccount, int] = {}
        for request in running:
            held[request.account] = held.get(request.account, 0.0) + size(request)
            num_running[request.account] = num_running.get(request.account, 0) + 1
        found: list[Request] = []
        for request in reversed(running):
            if wanted <= 0:
                break
            other = request.account
            if other is claimant or other is self._probes or other.counter <= claimant.counter:
                continue
            if num_running[other] > 1 and held[other] > self.share(other) * total:
                found.append(request)
                wanted -= size(request)
                held[other] -= size(request)
                num_running[other] -= 1
        return found

    def arrange(self, running: list[Request], key: Callable[[Request], tuple[int, ...]]) -> None:
        """Put running requests in the order of `key`, with tenants taking turns by weight.

        The last is preempted first: of the tenant with the most running requests for its weight.
        """
        self.is_unsorted = False
        running.sort(key=key)
        if not self.several:
            return
        counts: dict[TenantAccount, int] = {}
        turns: dict[Request, tuple[float, ...]] = {}
        for request in running:
            account = request.account
            count = counts[account] = counts.get(account, 0) + 1
            order = CLASSES.get(request.priority, 0)
            turns[request] = (order, count / account.weight, *key(request))
        running.sort(key=turns.__getitem__)
