"""The files and batches of one server: the store, and the task that runs batches."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from windlass.serve.batch.dispatch import Dispatcher, Endpoint
from windlass.serve.batch.lines import LineError, LineRules
from windlass.serve.batch.runner import BatchRunner
from windlass.serve.batch.store import Store
from windlass.serve.live_config import LiveConfig
from windlass.serve.prepare import Preparer

MAX_REQUESTS = 50_000  # of one batch


class BatchService:
    """Owns the store. `endpoints` are set by the router, before `run`."""

    def __init__(self, folder: str, config: LiveConfig, preparer: Preparer) -> None:
        self.store = Store(Path(folder).expanduser())
        self.endpoints: Mapping[str, Endpoint] = {}
        self._config = config
        self._preparer = preparer
        self._runner: BatchRunner | None = None

    async def run(self, max_num_seqs: int) -> None:
        """Run batches until cancelled. The default limit leaves half of the slots to live requests."""
        limit = self._config.value.max_num_batch_reqs or max(1, max_num_seqs // 2)
        self._runner = BatchRunner(self.store, Dispatcher(self.endpoints, limit), self.rules)
        await self._runner.run_forever()

    def rules(self, endpoint: str) -> LineRules:
        return LineRules(
            urls=(endpoint,),
            max_body_bytes=self._config.value.max_body_bytes,
            check_model=self._preparer.adapter_of,
            max_lines=MAX_REQUESTS,
        )

    def wake(self) -> None:
        """Look for new and cancelled batches now, not at the next tick."""
        if self._runner is not None:
            self._runner.wake()

    def problem_of(self, batch_id: str) -> LineError | None:
        """What holds up a batch now."""
        return None if self._runner is None else self._runner.problems.get(batch_id)

    def close(self) -> None:
        self.store.database.close()


def make_batch_service(config: LiveConfig, preparer: Preparer) -> BatchService | None:
    """Open the store of --data-dir; None: the server keeps no files."""
    folder = config.value.data_dir
    return None if folder is None else BatchService(folder, config, preparer)
