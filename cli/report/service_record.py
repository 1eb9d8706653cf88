"""`read_service`: the models, queues and samplers of a service, read from its database without changing it."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import StorageError

_TIMEOUT_S = 5.0
_MODELS = """
SELECT models.id, models.client, models.state, models.created, models.used,
    CASE json_type(models.about, '$.config') WHEN 'null' THEN 'all weights'
        ELSE json_extract(models.about, '$.config.rank') END AS rank,
    (SELECT COUNT(*) FROM requests WHERE owner = models.id AND kind = 'optim_step' AND state = 'done') AS steps,
    (SELECT COUNT(*) FROM requests WHERE owner = models.id AND state = 'queued') AS queued,
    (SELECT COUNT(*) FROM checkpoints WHERE model = models.id) AS checkpoints
FROM models ORDER BY models.used DESC LIMIT ?
"""
_QUEUES = """
SELECT kind, SUM(state = 'queued') AS queued, SUM(state = 'done') AS done, SUM(state = 'failed') AS failed,
    MIN(CASE WHEN state = 'queued' THEN created END) AS oldest_queued, AVG(finished - created) AS mean_s
FROM requests GROUP BY kind ORDER BY kind LIMIT ?
"""
_SAMPLERS = """
SELECT id, client, COALESCE(checkpoint, model, '') AS weights, inflight, created, clients FROM samplers
ORDER BY created DESC LIMIT ?
"""


def read_service(path: Path, most: int) -> dict[str, list[dict[str, Any]]]:
    """Read at most `most` models, kinds of requests and samplers from the database at `path`, of a running or ended service.

    Raises:
        StorageError: The database can't be read.
    """
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True, timeout=_TIMEOUT_S)) as database:
            return {
                name: _rows(database, query, [most])
                for name, query in (("models", _MODELS), ("queues", _QUEUES), ("samplers", _SAMPLERS))
            }
    except sqlite3.Error as cause:
        raise StorageError(
            f"{path} cannot be read: {cause}.", part="report", hint="Is it the database of this weightlane's service?"
        ) from cause


def _rows(database: sqlite3.Connection, query: str, values: Sequence[object]) -> list[dict[str, Any]]:
    cursor = database.execute(query, values)
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor]
