-- The embedded file: its tables, and every statement that is run against it.
-- A comment with a name opens a statement; a sentence under it says what it is for.
--
-- A run is its row in `runs` and its entries in `journal`. The columns of `runs` from `status`
-- on are a projection of the journal, kept for lists; whatever they say follows from it.

-- name: schema_1
-- A definition by its content: shared by every run and version that has it.
CREATE TABLE definitions (
  number INTEGER PRIMARY KEY,
  sha256 TEXT NOT NULL UNIQUE,
  content BLOB NOT NULL
);
-- A registered name. A deleted one stays, so that its version numbers go on.
CREATE TABLE workflows (
  name TEXT PRIMARY KEY,
  latest INTEGER NOT NULL,
  created_at REAL NOT NULL,
  updated_at REAL NOT NULL,
  deleted INTEGER NOT NULL DEFAULT 0
) WITHOUT ROWID;
CREATE TABLE versions (
  name TEXT NOT NULL,
  version INTEGER NOT NULL,
  definition INTEGER NOT NULL REFERENCES definitions (number),
  created_at REAL NOT NULL,
  PRIMARY KEY (name, version)
) WITHOUT ROWID;
CREATE TABLE aliases (
  name TEXT NOT NULL,
  alias TEXT NOT NULL,
  version INTEGER NOT NULL,
  PRIMARY KEY (name, alias)
) WITHOUT ROWID;
CREATE TABLE batches (
  number INTEGER PRIMARY KEY,
  batch_id TEXT NOT NULL UNIQUE,
  workflow TEXT NOT NULL,
  count INTEGER NOT NULL,
  created_at REAL NOT NULL
);
CREATE TABLE runs (
  number INTEGER PRIMARY KEY,
  run_id TEXT NOT NULL UNIQUE,
  workflow TEXT NOT NULL,
  version INTEGER,
  definition INTEGER NOT NULL REFERENCES definitions (number),
  retries BLOB NOT NULL,
  params BLOB NOT NULL,
  batch INTEGER REFERENCES batches (number),
  place INTEGER,
  created_at REAL NOT NULL,
  owner TEXT,
  status TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  started_at REAL,
  finished_at REAL,
  error BLOB,
  result BLOB
);
CREATE INDEX runs_by_status ON runs (status, number);
CREATE INDEX runs_by_workflow ON runs (workflow, number);
CREATE INDEX runs_unfinished ON runs (number) WHERE finished_at IS NULL;
CREATE UNIQUE INDEX runs_of_batch ON runs (batch, place) WHERE batch IS NOT NULL;
-- The log in pieces: a row holds what one commit added to one run. Its id is the run's number
-- and the piece's place in that run's log, in one integer (see `piece`): one tree, in order, and
-- two processes that add to the same run at the same place collide. That is the fence.
CREATE TABLE journal (
  id INTEGER PRIMARY KEY,
  seq INTEGER NOT NULL,
  entries BLOB NOT NULL
);
-- A process that drives runs. It is gone if it is dead, or silent past `lease_until`, which is
-- the machine's own steady clock and not the time of day.
CREATE TABLE owners (
  owner TEXT PRIMARY KEY,
  machine TEXT NOT NULL,
  pid INTEGER NOT NULL,
  started TEXT NOT NULL,
  lease_until REAL NOT NULL
) WITHOUT ROWID;
-- "Look at this run": somebody else has added to its log.
CREATE TABLE nudges (
  owner TEXT NOT NULL,
  run INTEGER NOT NULL,
  PRIMARY KEY (owner, run)
) WITHOUT ROWID;
-- Idempotency keys: what was asked under them, and the run or batch that it made.
CREATE TABLE keys (
  scope TEXT NOT NULL,
  key TEXT NOT NULL,
  body TEXT NOT NULL,
  made TEXT NOT NULL,
  PRIMARY KEY (scope, key)
) WITHOUT ROWID;
CREATE TABLE limits (
  tag TEXT PRIMARY KEY,
  rate_per_second REAL NOT NULL,
  burst INTEGER NOT NULL
) WITHOUT ROWID;
-- Outputs that other nodes may reuse.
CREATE TABLE cache (
  key TEXT PRIMARY KEY,
  expires_at REAL NOT NULL,
  output BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX cache_by_age ON cache (expires_at);

-- name: schema_2
-- What handlers logged, in chunks. `seq` is the number of the first line in the run's log; `content`
-- is a JSON array with an array of time, level, logger, message and maybe fields for each line.
-- `missing_lines` are missing right before the chunk.
CREATE TABLE logs (
  id INTEGER PRIMARY KEY,
  run INTEGER NOT NULL,
  seq INTEGER NOT NULL,
  node TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  attempt INTEGER NOT NULL,
  item INTEGER,
  number INTEGER NOT NULL,
  lines INTEGER NOT NULL,
  missing_lines INTEGER NOT NULL DEFAULT 0,
  missing_bytes INTEGER NOT NULL DEFAULT 0,
  content TEXT NOT NULL
);
CREATE UNIQUE INDEX logs_in_order ON logs (run, seq);
CREATE UNIQUE INDEX logs_by_attempt
  ON logs (run, node, epoch, attempt, IFNULL(item, -1), number);
CREATE TRIGGER logs_of_deleted_runs AFTER DELETE ON runs BEGIN
  DELETE FROM logs WHERE run = OLD.number;
END;

-- name: schema_3
-- The highest numbers of rows that were deleted. No number is given twice: a process knows a run and
-- a definition by its number, and would take another one for it.
CREATE TABLE last_numbers (
  name TEXT PRIMARY KEY,
  number INTEGER NOT NULL
) WITHOUT ROWID;
INSERT INTO last_numbers (name, number) VALUES ('runs', 0), ('definitions', 0), ('batches', 0);
-- How many runs of a batch were deleted, and when the last of these had ended.
ALTER TABLE batches ADD COLUMN deleted INTEGER NOT NULL DEFAULT 0;
ALTER TABLE batches ADD COLUMN deleted_end REAL;
-- To free the idempotency key of a run that is deleted.
CREATE INDEX keys_by_made ON keys (made);

-- name: schema_4
-- An alias that divides runs between versions: a JSON object of weights by version. `version` is then
-- the one with the largest weight.
ALTER TABLE aliases ADD COLUMN weights TEXT;
-- What was done to workflows and rate limits, and by whom. Rows are added and never changed; `kind`
-- is `workflow` or `limit`, `details` is a JSON object.
CREATE TABLE history (
  number INTEGER PRIMARY KEY,
  kind TEXT NOT NULL,
  name TEXT NOT NULL,
  time REAL NOT NULL,
  actor TEXT NOT NULL,
  action TEXT NOT NULL,
  details TEXT NOT NULL
);
CREATE INDEX history_by_name ON history (kind, name, number);

-- name: schema_5
-- The feed: the run events of all runs, in the order of their commits. The newest row stays, so that
-- no number is given twice; numbers have no gaps.
CREATE TABLE feed (
  number INTEGER PRIMARY KEY,
  run_id TEXT NOT NULL,
  workflow TEXT NOT NULL,
  seq INTEGER NOT NULL,
  time REAL NOT NULL,
  type TEXT NOT NULL,
  epoch INTEGER NOT NULL,
  data BLOB
);
-- Another file has another feed, with the same numbers.
CREATE TABLE feed_name (name TEXT NOT NULL);
INSERT INTO feed_name (name) VALUES (lower(hex(randomblob(4))));

-- name: schema_6
-- From this version on there are views.

-- name: drop_views
DROP VIEW IF EXISTS v_runs; DROP VIEW IF EXISTS v_nodes;
DROP VIEW IF EXISTS v_events; DROP VIEW IF EXISTS v_logs;

-- name: views
-- For users: docs/sql.md promises their columns. They are made again with each version of the schema.
-- `->` and MATERIALIZED are not used: an older SQLite could not open a file that has them. A row that
-- is no JSON is left out: it must not hide all others.
CREATE VIEW v_runs AS
SELECT r.run_id, r.workflow, r.version, r.status, r.epoch,
  CAST(r.params AS TEXT) AS params, CAST(r.result AS TEXT) AS result,
  CAST(r.error AS TEXT) AS error,
  strftime('%Y-%m-%dT%H:%M:%fZ', r.created_at, 'unixepoch') AS created_at,
  strftime('%Y-%m-%dT%H:%M:%fZ', r.started_at, 'unixepoch') AS started_at,
  strftime('%Y-%m-%dT%H:%M:%fZ', r.finished_at, 'unixepoch') AS finished_at,
  r.finished_at - r.started_at AS duration,
  b.batch_id, r.place AS batch_index,
  (SELECT k.key FROM keys k WHERE k.made = r.run_id) AS idempotency_key,
  (SELECT json_extract(CAST(j.entries AS TEXT), '$[0][2].forked_from') FROM journal j
   WHERE j.id = r.number << 24 AND json_valid(CAST(j.entries AS TEXT))) AS forked_from
FROM runs r LEFT JOIN batches b ON b.number = r.batch;
-- An entry is an array of time, transition, extra, outbox and events; an event is an array of type,
-- epoch, node, attempt and data (see `writer.encoded`). A window function counts the events of a piece.
-- The joins are in this order, so that an entry of thousands of events is parsed once. An item of a
-- node with `for_each` has a name such as `node[3]`.
CREATE VIEW v_events AS
SELECT run_id, workflow, seq, strftime('%Y-%m-%dT%H:%M:%fZ', at, 'unixepoch') AS time, type, epoch,
  CASE WHEN node LIKE '%]' THEN SUBSTR(node, 1, INSTR(node, '[') - 1) ELSE node END AS node,
  attempt,
  CASE WHEN node LIKE '%]' THEN CAST(SUBSTR(node, INSTR(node, '[') + 1) AS INTEGER) END AS item,
  data
FROM (
  SELECT r.run_id AS run_id, r.workflow AS workflow,
    j.seq - 1 + ROW_NUMBER() OVER (
      PARTITION BY r.run_id, r.workflow, j.id ORDER BY entry.key, event.key
    ) AS seq,
    at.value AS at,
    json_extract(event.value, '$[0]') AS type, json_extract(event.value, '$[1]') AS epoch,
    json_extract(event.value, '$[2]') AS node, json_extract(event.value, '$[3]') AS attempt,
    json_extract(event.value, '$[4]') AS data
  FROM runs r JOIN journal j ON j.id >= r.number << 24 AND j.id < (r.number + 1) << 24
    CROSS JOIN json_each(CASE WHEN json_valid(CAST(j.entries AS TEXT))
      THEN CAST(j.entries AS TEXT) ELSE '[]' END) entry
    CROSS JOIN json_each(entry.value, '$[0]') at CROSS JOIN json_each(entry.value, '$[4]') event
);
-- A node is what its last events say, unless a later retry of the run has set it back. Beside the
-- events of an entry there are rows for the nodes of the definition and for the nodes that a retry
-- has set back, and for outputs. They are no UNION: only so `WHERE run_id = ?` reaches the table of
-- runs. An output is taken by two paths, of which the second is never there: that gives an array, in
-- which true stays true. The greatest text is the newest: it begins with the place in the log (35
-- characters).
CREATE VIEW v_nodes AS
SELECT run_id, workflow, node, handler, status, epoch,
  CASE WHEN began IS NULL THEN 0 ELSE json_extract(began, '$[1]') END AS attempt,
  CASE WHEN status NOT IN ('PENDING', 'QUEUED') THEN json_extract(began, '$[2]') END AS worker,
  strftime('%Y-%m-%dT%H:%M:%fZ', json_extract(began, '$[0]'), 'unixepoch') AS started_at,
  strftime('%Y-%m-%dT%H:%M:%fZ', ended, 'unixepoch') AS finished_at,
  ended - json_extract(began, '$[0]') AS duration,
  CASE WHEN ended IS NOT NULL THEN json_extract(last, '$[3]') END AS reason,
  CASE WHEN ended IS NOT NULL THEN json_extract(last, '$[4]') END AS cause,
  CASE WHEN status <> 'COMPLETED' THEN json_remove(failed, '$.traceback') END AS error,
  CASE WHEN status = 'COMPLETED' THEN output END AS output
FROM (
  SELECT run_id, workflow, node, handler, last, began, failed, output,
    CASE
      WHEN last IS NULL THEN 'PENDING'
      WHEN json_extract(last, '$[0]') = 'node.started' THEN 'RUNNING'
      WHEN json_extract(last, '$[0]') IN ('node.completed', 'node.cached', 'node.reused')
        THEN 'COMPLETED'
      WHEN json_extract(last, '$[0]') IN ('node.failed', 'node.skipped', 'node.cancelled')
        THEN UPPER(SUBSTR(json_extract(last, '$[0]'), 6))
      ELSE 'QUEUED'
    END AS status,
    CASE WHEN last IS NULL THEN IFNULL(reset_epoch, 1) ELSE json_extract(last, '$[1]') END AS epoch,
    CASE WHEN json_extract(last, '$[0]') NOT IN
        ('node.queued', 'node.started', 'node.parked', 'node.retrying')
      THEN json_extract(last, '$[2]') END AS ended
  FROM (
    SELECT run_id, workflow, node, handler, reset_epoch,
      CASE WHEN last > reset THEN SUBSTR(last, 36) END AS last,
      CASE WHEN began > reset THEN SUBSTR(began, 36) END AS began,
      CASE WHEN failed > reset THEN SUBSTR(failed, 36) END AS failed,
      CASE WHEN output > reset THEN SUBSTR(output, 36) END AS output
    FROM (
      SELECT run_id, workflow, node, MAX(CASE WHEN type = 'defined' THEN data END) AS handler,
        IFNULL(MAX(CASE WHEN type = 'reset' THEN place END), '') AS reset,
        MAX(CASE WHEN type = 'reset' THEN epoch END) AS reset_epoch,
        MAX(CASE WHEN type IN (
            'node.queued', 'node.started', 'node.parked', 'node.retrying', 'node.completed',
            'node.cached', 'node.reused', 'node.failed', 'node.skipped', 'node.cancelled'
          ) THEN place || json_array(
            type, epoch, at, json_extract(data, '$.reason'), json_extract(data, '$.cause')
          ) END) AS last,
        MAX(CASE WHEN type = 'node.started'
          THEN place || json_array(at, attempt, json_extract(data, '$.worker')) END) AS began,
        MAX(CASE WHEN type IN ('node.failed', 'node.retrying')
          THEN place || json_extract(data, '$.error') END) AS failed,
        MAX(CASE WHEN type = 'output' THEN place || SUBSTR(data, 2, LENGTH(data) - 7) END) AS output
      FROM (
        SELECT r.run_id AS run_id, r.workflow AS workflow,
          json_extract(event.value, '$[2]') AS node,
          printf('%019d.%07d.%07d', j.id, entry.key, event.key) AS place,
          at.value AS at, json_extract(event.value, '$[0]') AS type,
          json_extract(event.value, '$[1]') AS epoch, json_extract(event.value, '$[3]') AS attempt,
          json_extract(event.value, '$[4]') AS data
        FROM runs r JOIN definitions d ON d.number = r.definition
          JOIN journal j ON j.id >= r.number << 24 AND j.id < (r.number + 1) << 24
          CROSS JOIN json_each(CASE WHEN json_valid(CAST(j.entries AS TEXT))
            THEN CAST(j.entries AS TEXT) ELSE '[]' END) entry
          CROSS JOIN json_each(entry.value, '$[0]') at
          CROSS JOIN json_each(CASE
            WHEN j.id = r.number << 24 AND entry.key = 0 AND json_valid(CAST(d.content AS TEXT)) THEN
              (SELECT SUBSTR(defined, 1, LENGTH(defined) - 1) FROM (
                 SELECT json_group_array(json(one)) AS defined FROM (
                   SELECT json_array('defined', NULL, json_extract(value, '$.id'), NULL,
                     json_extract(value, '$.handler')) AS one
                   FROM json_each(CAST(d.content AS TEXT), '$.nodes')
                   UNION ALL
                   SELECT json_array('output', NULL, key, NULL, json_array(CASE
                     WHEN type IN ('object', 'array', 'true', 'false')
                       THEN json(CASE type WHEN 'true' THEN 'true' WHEN 'false' THEN 'false'
                         ELSE value END)
                     ELSE value END, NULL))
                   FROM json_each(entry.value, '$[2].outputs')
                 )))
              || ',' || SUBSTR(json_extract(entry.value, '$[4]'), 2)
            WHEN json_extract(entry.value, '$[1]') = 'retry'
              AND json_array_length(entry.value, '$[2]') > 0 THEN
              -- With items that a retry keeps, the list is the first of two.
              (SELECT SUBSTR(again, 1, LENGTH(again) - 1) FROM (
                 SELECT json_group_array(json_array('reset',
                   json_extract(entry.value, '$[4][0][1]'), json_extract(value, '$.id'), NULL, NULL
                 )) AS again
                 FROM json_each(CAST(d.content AS TEXT), '$.nodes')
                 WHERE key IN (SELECT value FROM json_each(entry.value, CASE
                   json_type(entry.value, '$[2][0]') WHEN 'array' THEN '$[2][0]' ELSE '$[2]' END))))
              || ',' || SUBSTR(json_extract(entry.value, '$[4]'), 2)
            WHEN json_extract(entry.value, '$[1]') IN ('complete', 'recall')
              AND json_array_length(entry.value, '$[4]') > 0 THEN
              '[["output",null,"' || json_extract(entry.value, '$[4][0][2]') || '",null,'
              || json_extract(entry.value, '$[2]', '$[9]')
              || '],' || SUBSTR(json_extract(entry.value, '$[4]'), 2)
            ELSE json_extract(entry.value, '$[4]')
          END) event
        WHERE json_extract(event.value, '$[2]') NOT LIKE '%]'
      )
      GROUP BY run_id, workflow, node
    )
  )
);
CREATE VIEW v_logs AS
SELECT r.run_id, r.workflow, l.seq + line.key AS seq,
  strftime('%Y-%m-%dT%H:%M:%fZ', json_extract(line.value, '$[0]'), 'unixepoch') AS time,
  l.node, l.epoch, l.attempt, l.item, json_extract(line.value, '$[1]') AS level,
  json_extract(line.value, '$[2]') AS logger, json_extract(line.value, '$[3]') AS message,
  json_extract(line.value, '$[4]') AS fields
FROM runs r JOIN logs l ON l.run = r.number,
  json_each(CASE WHEN json_valid(l.content) THEN l.content ELSE '[]' END) line;

-- name: schema_7
-- Notifications of runs that ended, from the commit of the end until a receiver has accepted them.
-- `content` is a JSON object with the fields of `Notification`.
CREATE TABLE outbox (
  id TEXT PRIMARY KEY,
  due_at REAL NOT NULL,
  content BLOB NOT NULL
) WITHOUT ROWID;
CREATE INDEX outbox_by_time ON outbox (due_at);
-- Notifications that were given up, as `GET /dead-letters` shows them.
CREATE TABLE dead_letters (
  number INTEGER PRIMARY KEY,
  content BLOB NOT NULL
);
-- How many pieces of a run's log are exported.
CREATE TABLE exported (
  run INTEGER PRIMARY KEY,
  pieces INTEGER NOT NULL
);
CREATE TRIGGER exported_of_deleted_runs AFTER DELETE ON runs BEGIN
  DELETE FROM exported WHERE run = OLD.number;
END;
-- The process that exports events, and up to which event of the feed the runs are exported.
CREATE TABLE export (
  id INTEGER PRIMARY KEY,
  owner TEXT,
  until REAL NOT NULL DEFAULT 0,
  position INTEGER
);
INSERT INTO export (id) VALUES (1);

-- name: schema_8
-- The feed has a row for the run events of a commit, at most 100 of them. `number` is that of the
-- last one, `time` its time, `events` a JSON array of [run, workflow, seq, time, type, epoch, data].
ALTER TABLE feed RENAME TO feed_by_event;
CREATE TABLE feed (
  number INTEGER PRIMARY KEY,
  count INTEGER NOT NULL,
  time REAL NOT NULL,
  events BLOB NOT NULL
);
INSERT INTO feed
SELECT number, 1, time, json_array(json_array(
  run_id, workflow, seq, time, type, epoch,
  CASE WHEN json_valid(CAST(data AS TEXT)) THEN json(CAST(data AS TEXT)) END
))
FROM feed_by_event;
DROP TABLE feed_by_event;

-- ── runs and their log ──────────────────────────────────────────────────────────────────

-- name: add_definition
INSERT OR IGNORE INTO definitions (number, sha256, content) VALUES (
  1 + MAX(
    IFNULL((SELECT MAX(number) FROM definitions), 0),
    (SELECT number FROM last_numbers WHERE name = 'definitions')
  ), ?, ?
);

-- name: find_definition
SELECT number FROM definitions WHERE sha256 = ?;

-- name: read_definition
SELECT content FROM definitions WHERE number = ?;

-- name: add_run
-- Nothing, if the id or the place in the batch is taken.
INSERT INTO runs (
  number, run_id, workflow, version, definition, retries, params, batch, place, created_at, owner,
  status, epoch, started_at, finished_at, error, result
) VALUES (
  1 + MAX(
    IFNULL((SELECT MAX(number) FROM runs), 0),
    (SELECT number FROM last_numbers WHERE name = 'runs')
  ), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?
) ON CONFLICT DO NOTHING;

-- name: find_place
SELECT run_id FROM runs WHERE batch = ? AND place = ?;

-- name: add_entries
-- Fewer rows than given were added: another process was faster, see `journal`, or has deleted the
-- run. The number of the run is in the high bits of the id (see `piece`).
INSERT OR IGNORE INTO journal (id, seq, entries)
SELECT ?1, ?2, ?3 WHERE EXISTS (SELECT 1 FROM runs WHERE number = ?1 >> 24);

-- name: has_run
SELECT 1 FROM runs WHERE number = ?;

-- name: has_piece
SELECT 1 FROM journal WHERE id = ?;

-- name: project_run
-- A finished run has no owner.
UPDATE runs SET status = ?, epoch = ?, started_at = ?, finished_at = ?, error = ?, result = ?,
  owner = CASE WHEN ? THEN NULL ELSE owner END
WHERE number = ?;

-- name: read_run
SELECT number, run_id, workflow, version, definition, retries, params, created_at, owner
FROM runs WHERE run_id = ?;

-- name: end_damaged
-- A user ends a run whose log cannot be read. The log stays as it is.
UPDATE runs SET status = ?, finished_at = ?, error = ?, result = NULL, owner = NULL
WHERE run_id = ? AND finished_at IS NULL;

-- name: looked_through
-- For the doctor: what is unfinished, and the newest of the rest.
SELECT number, run_id, workflow, version, definition, retries, params, created_at, owner
FROM runs WHERE finished_at IS NULL OR number > (SELECT MAX(number) FROM runs) - ?1
ORDER BY number DESC LIMIT ?2;

-- name: read_entries
SELECT id, seq, entries FROM journal WHERE id BETWEEN ? AND ? ORDER BY id;

-- name: piece_with
-- The piece that holds the event, or the one before it.
SELECT MAX(id) FROM journal WHERE id BETWEEN ? AND ? AND seq <= ?;

-- name: is_finished
SELECT number, finished_at IS NOT NULL FROM runs WHERE run_id = ?;

-- name: last_run
SELECT number FROM runs ORDER BY number DESC LIMIT 1;

-- name: run_from
-- The first run at a number or after it, and when it was created.
SELECT number, created_at FROM runs WHERE number >= ? ORDER BY number LIMIT 1;

-- name: count_runs
-- Off the index alone.
SELECT COUNT(*) FROM runs INDEXED BY runs_by_status WHERE status = ? AND number >= ? AND number < ?;

-- name: count_runs_of_workflow
SELECT status, COUNT(*) FROM runs INDEXED BY runs_by_workflow
WHERE workflow = ? AND number >= ? AND number < ? GROUP BY status;

-- name: find_runs
SELECT run_id FROM runs WHERE run_id >= ? AND run_id < ? ORDER BY run_id LIMIT 5;

-- name: summaries
-- Newest first, before a number; the conditions that are wanted follow it, each on an index. Which
-- runs these are is read off the index: only they are fetched, not all of a large batch. A result
-- of more bytes than the third value is not read.
SELECT number, run_id, workflow, version, status, epoch, params, created_at, started_at,
  finished_at, error,
  CASE WHEN length(result) <= IFNULL(?3, length(result)) THEN result END, length(result)
FROM runs WHERE number IN (
  SELECT number FROM runs WHERE number < ?1 {conditions} ORDER BY number DESC LIMIT ?2
) ORDER BY number DESC;

-- name: summary
SELECT number, run_id, workflow, version, status, epoch, params, created_at, started_at,
  finished_at, error,
  CASE WHEN length(result) <= IFNULL(?2, length(result)) THEN result END, length(result)
FROM runs WHERE run_id = ?1;

-- ── what handlers log ───────────────────────────────────────────────────────────────────

-- name: add_log
-- Nothing, if the chunk is there, or if the run is not. A chunk without lines has a number, too.
INSERT OR IGNORE INTO logs (run, seq, node, epoch, attempt, item, number, lines, content)
SELECT number, IFNULL(
  (SELECT seq + MAX(lines, 1) FROM logs WHERE run = runs.number ORDER BY seq DESC LIMIT 1), 1
), ?2, ?3, ?4, ?5, ?6, ?7, ?8
FROM runs WHERE run_id = ?1;

-- name: drop_log
DELETE FROM logs WHERE run = (SELECT number FROM runs WHERE run_id = ?1)
  AND node = ?2 AND epoch = ?3 AND attempt = ?4 AND IFNULL(item, -1) = IFNULL(?5, -1)
  AND number = ?6;

-- name: note_missing
-- An attempt lacks ?7 lines by now. Those that are noted nowhere are missing before its first chunk
-- from number ?6 on.
UPDATE logs SET
  missing_lines = logs.missing_lines + MAX(0, ?7 - noted.missing_lines),
  missing_bytes = logs.missing_bytes + MAX(0, ?8 - noted.missing_bytes)
FROM (
  SELECT SUM(missing_lines) AS missing_lines, SUM(missing_bytes) AS missing_bytes,
    MIN(number) FILTER (WHERE number >= ?6) AS next
  FROM logs WHERE run = (SELECT number FROM runs WHERE run_id = ?1)
    AND node = ?2 AND epoch = ?3 AND attempt = ?4 AND IFNULL(item, -1) = IFNULL(?5, -1)
) AS noted
WHERE run = (SELECT number FROM runs WHERE run_id = ?1)
  AND node = ?2 AND epoch = ?3 AND attempt = ?4 AND IFNULL(item, -1) = IFNULL(?5, -1)
  AND number = noted.next;

-- name: read_logs
-- From the chunk on that has the line after ?2.
SELECT seq, node, epoch, attempt, item, number, missing_lines, missing_bytes, content FROM logs
WHERE run = ?1 AND seq + MAX(lines, 1) > ?2 + 1
  AND seq >= IFNULL((SELECT MAX(seq) FROM logs WHERE run = ?1 AND seq <= ?2 + 1), 0) {conditions}
ORDER BY seq;

-- ── the feed of all runs ────────────────────────────────────────────────────────────────

-- name: add_to_feed
INSERT INTO feed (number, count, time, events)
SELECT IFNULL(MAX(number), 0) + ?1, ?1, ?2, ?3 FROM feed;

-- name: read_feed
SELECT number, count, events FROM feed WHERE number > ? ORDER BY number LIMIT ?;

-- name: feed_range
-- The name of the feed, the last event that has left it, and its newest event.
SELECT name,
  IFNULL((SELECT number - count FROM feed ORDER BY number LIMIT 1), 0),
  IFNULL((SELECT MAX(number) FROM feed), 0)
FROM feed_name;

-- name: trim_feed
-- Rows of events before ?1, and all but so many of the newest; the newest row stays in any case.
DELETE FROM feed WHERE number < MAX(
  (SELECT MAX(number) FROM feed) - ?2 + 1,
  IFNULL(
    (SELECT number FROM feed WHERE time >= ?1 ORDER BY number LIMIT 1),
    (SELECT MAX(number) FROM feed)
  )
);

-- ── notifications ───────────────────────────────────────────────────────────────────────

-- name: add_notification
INSERT OR IGNORE INTO outbox (id, due_at, content) VALUES (?, ?, ?);

-- name: due_notifications
SELECT id, content FROM outbox WHERE due_at <= ? ORDER BY due_at LIMIT ?;

-- name: next_notification
SELECT MIN(due_at) FROM outbox;

-- name: claim_notification
-- Nothing, if another process was faster.
UPDATE outbox SET due_at = ?3 WHERE id = ?1 AND due_at <= ?2;

-- name: change_notification
UPDATE outbox SET due_at = ?2, content = ?3 WHERE id = ?1;

-- name: remove_notification
DELETE FROM outbox WHERE id = ?;

-- name: count_notifications
SELECT COUNT(*), MIN(due_at), (SELECT COUNT(*) FROM dead_letters) FROM outbox;

-- name: add_dead_letter
INSERT INTO dead_letters (content) VALUES (?);

-- name: trim_dead_letters
DELETE FROM dead_letters WHERE number <= (SELECT MAX(number) FROM dead_letters) - ?;

-- name: dead_letters
SELECT number, content FROM dead_letters ORDER BY number DESC LIMIT ?;

-- name: dead_letter
SELECT content FROM dead_letters WHERE number = ?;

-- name: drop_dead_letter
DELETE FROM dead_letters WHERE number = ?;

-- ── events are exported ─────────────────────────────────────────────────────────────────

-- name: lead_export
-- Nothing, if another process exports.
UPDATE export SET owner = ?1, until = ?2 WHERE owner IS NULL OR owner = ?1 OR until < ?3;

-- name: leave_export
UPDATE export SET owner = NULL WHERE owner = ?;

-- name: export_position
SELECT position, IFNULL((SELECT MAX(number) FROM feed), 0) FROM export;

-- name: set_export_position
UPDATE export SET position = ?;

-- name: unexported_runs
-- Unfinished runs with a piece that is not exported.
SELECT run_id FROM runs LEFT JOIN exported ON run = number
WHERE finished_at IS NULL
  AND EXISTS (SELECT 1 FROM journal WHERE id = number * 16777216 + IFNULL(pieces, 0));

-- name: exported_pieces
SELECT number, workflow, IFNULL((SELECT pieces FROM exported WHERE run = number), 0)
FROM runs WHERE run_id = ?;

-- name: set_exported
INSERT OR REPLACE INTO exported (run, pieces) SELECT number, ?2 FROM runs WHERE run_id = ?1;

-- ── runs are deleted ────────────────────────────────────────────────────────────────────

-- name: ended_runs
-- After a number, oldest first, whether they have ended or not: the reader stops at the first run
-- that was created too late.
SELECT number, run_id, created_at, finished_at FROM runs WHERE number > ? ORDER BY number LIMIT ?;

-- name: deletable_run
-- A run that ended at that time or before.
SELECT number, definition, workflow, batch, finished_at FROM runs
WHERE run_id = ? AND finished_at <= ?;

-- name: delete_journal
DELETE FROM journal WHERE id BETWEEN :first_piece AND :last_piece;

-- name: delete_keys
DELETE FROM keys WHERE made = :run_id;

-- name: delete_notifications
DELETE FROM nudges WHERE run = :number;

-- name: delete_run
DELETE FROM runs WHERE number = :number;

-- name: keep_number
UPDATE last_numbers SET number = MAX(number, ?) WHERE name = ?;

-- name: count_deleted
UPDATE batches SET deleted = deleted + 1, deleted_end = MAX(IFNULL(deleted_end, 0.0), ?)
WHERE number = ?;

-- name: emptied_batch
-- All its runs were there once, and none is left.
SELECT batch_id FROM batches WHERE number = ?1 AND deleted >= count
  AND NOT EXISTS (SELECT 1 FROM runs WHERE batch = ?1);

-- name: delete_batch
DELETE FROM batches WHERE number = ?;

-- name: delete_unused_definition
-- A run and a version have the name that their definition has.
DELETE FROM definitions WHERE number = ?1
  AND NOT EXISTS (SELECT 1 FROM versions WHERE name = ?2 AND definition = ?1)
  AND NOT EXISTS (SELECT 1 FROM runs WHERE workflow = ?2 AND definition = ?1);

-- ── owners ──────────────────────────────────────────────────────────────────────────────

-- name: add_owner
INSERT OR REPLACE INTO owners (owner, machine, pid, started, lease_until) VALUES (?, ?, ?, ?, ?);

-- name: renew_owner
UPDATE owners SET lease_until = ? WHERE owner = ?;

-- name: drop_owner
DELETE FROM owners WHERE owner = ?;

-- name: drop_old_owners
-- Owners of an earlier boot, and owners that have been silent for long.
DELETE FROM owners WHERE (machine NOT LIKE ? OR lease_until < ?)
  AND owner NOT IN (SELECT owner FROM runs WHERE finished_at IS NULL AND owner IS NOT NULL);

-- name: drop_old_notifications
DELETE FROM nudges WHERE owner NOT IN (SELECT owner FROM owners);

-- name: owners
SELECT owner, machine, pid, started, lease_until FROM owners;

-- name: unfinished
SELECT number, run_id, owner FROM runs WHERE finished_at IS NULL ORDER BY number;

-- name: own_run
UPDATE runs SET owner = ? WHERE number = ? AND finished_at IS NULL;

-- name: disown_run
UPDATE runs SET owner = NULL WHERE number = ? AND owner = ?;

-- name: owner_of
SELECT owner FROM runs WHERE number = ?;

-- name: notify_owner
-- Notify the owner of the run, unless it is this process.
INSERT OR IGNORE INTO nudges (owner, run)
SELECT owner, number FROM runs WHERE number = ? AND owner IS NOT NULL AND owner <> ?;

-- name: notifications
SELECT run FROM nudges WHERE owner = ?;

-- name: drop_notification
DELETE FROM nudges WHERE owner = ? AND run = ?;

-- name: drop_notifications_of
DELETE FROM nudges WHERE owner = ?;

-- ── keys, batches ───────────────────────────────────────────────────────────────────────

-- name: find_key
SELECT body, made FROM keys WHERE scope = ? AND key = ?;

-- name: add_key
INSERT INTO keys (scope, key, body, made) VALUES (?, ?, ?, ?);

-- name: add_batch
INSERT INTO batches (number, batch_id, workflow, count, created_at) VALUES (
  1 + MAX(
    IFNULL((SELECT MAX(number) FROM batches), 0),
    (SELECT number FROM last_numbers WHERE name = 'batches')
  ), ?, ?, ?, ?
);

-- name: read_batch
SELECT number, batch_id, workflow, count, created_at, deleted, deleted_end FROM batches
WHERE batch_id = ?;

-- name: find_batches
SELECT batch_id FROM batches WHERE batch_id >= ? AND batch_id < ? ORDER BY batch_id LIMIT 5;

-- name: list_batches
SELECT number, batch_id FROM batches WHERE number < ? ORDER BY number DESC LIMIT ?;

-- name: batch_counts
SELECT status, COUNT(*), COUNT(finished_at), MAX(finished_at) FROM runs
WHERE batch = ? GROUP BY status;

-- name: batch_runs
SELECT place, run_id, status FROM runs WHERE batch = ? AND place >= ? ORDER BY place LIMIT ?;

-- ── registered workflows ────────────────────────────────────────────────────────────────

-- name: read_workflow
SELECT name, latest, created_at, updated_at, deleted FROM workflows WHERE name = ?;

-- name: workflows
SELECT name, latest, created_at, updated_at FROM workflows
WHERE NOT deleted AND name > ? ORDER BY name LIMIT ?;

-- name: save_workflow
INSERT INTO workflows (name, latest, created_at, updated_at) VALUES (?, ?, ?, ?)
ON CONFLICT (name) DO UPDATE SET
  latest = excluded.latest,
  updated_at = excluded.updated_at,
  created_at = CASE WHEN deleted THEN excluded.created_at ELSE created_at END,
  deleted = 0;

-- name: delete_workflow
UPDATE workflows SET deleted = 1 WHERE name = ?;

-- name: drop_aliases
DELETE FROM aliases WHERE name = ?;

-- name: drop_versions
-- Runs keep their definitions; only the name lets go of them.
DELETE FROM versions WHERE name = ?;

-- name: drop_version
DELETE FROM versions WHERE name = ? AND version = ?;

-- name: has_version
SELECT 1 FROM versions WHERE name = ? AND version = ?;

-- name: active_runs
-- Of a version, or of all if none is given.
SELECT COUNT(*) FROM runs WHERE workflow = ?1 AND finished_at IS NULL
  AND version IS NOT NULL AND version = IFNULL(?2, version);

-- name: add_version
INSERT INTO versions (name, version, definition, created_at) VALUES (?, ?, ?, ?);

-- name: read_version
SELECT v.version, v.definition, v.created_at, d.content FROM versions v
JOIN definitions d ON d.number = v.definition
WHERE v.name = ? AND v.version = ?;

-- name: versions
SELECT v.version, d.sha256, v.created_at FROM versions v
JOIN definitions d ON d.number = v.definition
WHERE v.name = ? ORDER BY v.version;

-- name: aliases
SELECT alias, version, weights FROM aliases WHERE name = ? ORDER BY alias;

-- name: delete_alias
DELETE FROM aliases WHERE name = ? AND alias = ?;

-- name: set_alias
INSERT OR REPLACE INTO aliases (name, alias, version, weights) VALUES (?, ?, ?, ?);

-- name: add_history
INSERT INTO history (kind, name, time, actor, action, details) VALUES (?, ?, ?, ?, ?, ?);

-- name: history
SELECT number, time, actor, action, details FROM history
WHERE kind = ? AND name = ? AND number < ? ORDER BY number DESC LIMIT ?;

-- ── limits, cache ───────────────────────────────────────────────────────────────────────

-- name: limits
SELECT tag, rate_per_second, burst FROM limits ORDER BY tag;

-- name: read_limit
SELECT rate_per_second, burst FROM limits WHERE tag = ?;

-- name: set_limit
INSERT OR REPLACE INTO limits (tag, rate_per_second, burst) VALUES (?, ?, ?);

-- name: keep_output
INSERT OR REPLACE INTO cache (key, expires_at, output) VALUES (?, ?, ?);

-- name: recall_output
SELECT output FROM cache WHERE key = ? AND expires_at > ?;

-- name: drop_old_outputs
DELETE FROM cache WHERE expires_at <= ?;

-- ── the doctor ──────────────────────────────────────────────────────────────────────────

-- name: counts
SELECT COUNT(*), COUNT(*) FILTER (WHERE finished_at IS NULL) FROM runs;

-- name: things
-- The tables and indexes that are there.
SELECT name FROM sqlite_master;

-- name: newest_run
SELECT MAX(created_at) FROM runs;
