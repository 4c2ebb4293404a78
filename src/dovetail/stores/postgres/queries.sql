-- The archive: its tables, and every statement that is run against it.
-- A comment with a name opens a statement; a sentence under it says what it is for.
--
-- Everything is in a schema of its own, so that another program's tables do no harm. Whatever
-- users or handlers wrote is bytes, not jsonb: that refuses U+0000 and rewrites numbers.
-- `events` and `nodes` have no foreign key to `runs`: they are written under the lock of their
-- run's row, and a check for every event would cost more than writing it.

-- name: schema_1
-- A definition by its content: shared by every run and version that has it.
CREATE TABLE dovetail.definitions (
  number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  sha256 TEXT COLLATE "C" NOT NULL UNIQUE,
  content BYTEA NOT NULL
);
-- A registered name. A deleted one stays, so that its version numbers go on.
CREATE TABLE dovetail.workflows (
  name TEXT COLLATE "C" PRIMARY KEY,
  latest BIGINT NOT NULL,
  created_at FLOAT8 NOT NULL,
  updated_at FLOAT8 NOT NULL,
  deleted BOOLEAN NOT NULL
);
CREATE TABLE dovetail.versions (
  name TEXT COLLATE "C" NOT NULL,
  version BIGINT NOT NULL,
  definition BIGINT NOT NULL REFERENCES dovetail.definitions (number),
  created_at FLOAT8 NOT NULL,
  PRIMARY KEY (name, version)
);
CREATE TABLE dovetail.aliases (
  name TEXT COLLATE "C" NOT NULL,
  alias TEXT COLLATE "C" NOT NULL,
  version BIGINT NOT NULL,
  PRIMARY KEY (name, alias)
);
CREATE TABLE dovetail.batches (
  number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  batch_id TEXT COLLATE "C" NOT NULL UNIQUE,
  workflow TEXT NOT NULL,
  count BIGINT NOT NULL,
  created_at FLOAT8 NOT NULL
);
-- A run as it was accepted; from `generation` on, what the archiver has seen of it since.
-- `meta` is what Redis keeps of it beyond the columns.
CREATE TABLE dovetail.runs (
  number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  run_id TEXT COLLATE "C" NOT NULL UNIQUE,
  workflow TEXT COLLATE "C" NOT NULL,
  version BIGINT,
  definition BIGINT NOT NULL REFERENCES dovetail.definitions (number),
  retries BYTEA NOT NULL,
  params BYTEA NOT NULL,
  batch BIGINT REFERENCES dovetail.batches (number),
  place BIGINT,
  created_at FLOAT8 NOT NULL,
  generation BIGINT NOT NULL DEFAULT 0,
  last_seq BIGINT NOT NULL DEFAULT 0,
  status TEXT NOT NULL DEFAULT 'PENDING',
  epoch BIGINT NOT NULL DEFAULT 1,
  started_at FLOAT8,
  finished_at FLOAT8,
  error BYTEA,
  result BYTEA,
  meta BYTEA
);
CREATE INDEX runs_by_status ON dovetail.runs (status, number);
CREATE INDEX runs_by_workflow ON dovetail.runs (workflow, number);
CREATE INDEX runs_unfinished ON dovetail.runs (number) WHERE finished_at IS NULL;
CREATE INDEX runs_active ON dovetail.runs (workflow)
  WHERE finished_at IS NULL AND version IS NOT NULL;
CREATE UNIQUE INDEX runs_of_batch ON dovetail.runs (batch, place) WHERE batch IS NOT NULL;
-- A node as Redis keeps it.
CREATE TABLE dovetail.nodes (
  run BIGINT NOT NULL,
  place BIGINT NOT NULL,
  state BYTEA NOT NULL,
  output BYTEA,
  ends BYTEA,
  PRIMARY KEY (run, place)
);
-- The log, as Redis keeps it. A number is used again when Redis came back with an older tail:
-- then under the next generation.
CREATE TABLE dovetail.events (
  run BIGINT NOT NULL,
  generation BIGINT NOT NULL,
  seq BIGINT NOT NULL,
  event BYTEA NOT NULL,
  PRIMARY KEY (run, generation, seq)
);
-- Which generations make up a run's log, and from where on each replaces those before it; that the
-- first begins it goes without saying. Events
-- of any other generation are kept and not shown: a finished run was finished.
CREATE TABLE dovetail.generations (
  run BIGINT NOT NULL,
  generation BIGINT NOT NULL,
  first_seq BIGINT NOT NULL,
  PRIMARY KEY (run, generation)
);
-- Idempotency keys: what was asked under them, and the run or batch that it made.
CREATE TABLE dovetail.keys (
  scope TEXT COLLATE "C" NOT NULL,
  key BYTEA NOT NULL,
  body TEXT NOT NULL,
  made TEXT NOT NULL,
  PRIMARY KEY (scope, key)
);
CREATE TABLE dovetail.limits (
  tag BYTEA PRIMARY KEY,
  rate_per_second FLOAT8 NOT NULL,
  burst BIGINT NOT NULL
);
CREATE TABLE dovetail.schema_version (
  version BIGINT NOT NULL
);
INSERT INTO dovetail.schema_version (version) VALUES (0);

-- name: schema_2
-- What handlers logged, in chunks. `seq` is the number of the first line in the run's log; `content`
-- is a JSON array with an array of time, level, logger, message and maybe fields for each line.
-- `missing_lines` are missing right before the chunk. Redis may have lost lines before they were
-- archived: up to `log_lost_seq`.
CREATE TABLE dovetail.logs (
  run BIGINT NOT NULL REFERENCES dovetail.runs (number) ON DELETE CASCADE,
  seq BIGINT NOT NULL,
  node TEXT COLLATE "C" NOT NULL,
  epoch BIGINT NOT NULL,
  attempt BIGINT NOT NULL,
  item BIGINT,
  number BIGINT NOT NULL,
  lines BIGINT NOT NULL,
  missing_lines BIGINT NOT NULL DEFAULT 0,
  missing_bytes BIGINT NOT NULL DEFAULT 0,
  content BYTEA NOT NULL,
  PRIMARY KEY (run, seq)
);
CREATE UNIQUE INDEX logs_by_attempt
  ON dovetail.logs (run, node, epoch, attempt, COALESCE(item, -1), number);
ALTER TABLE dovetail.runs
  ADD COLUMN log_seq BIGINT NOT NULL DEFAULT 0,
  ADD COLUMN log_lost_seq BIGINT NOT NULL DEFAULT 0,
  ADD COLUMN log_lost_lines BIGINT NOT NULL DEFAULT 0,
  ADD COLUMN log_lost_bytes BIGINT NOT NULL DEFAULT 0;

-- name: schema_3
-- Runs that were deleted lately. An archiver may have read one before, and would write it again.
-- `request` names the call that deleted it: a transaction that is repeated finds its own traces.
CREATE TABLE dovetail.deleted_runs (
  run_id TEXT COLLATE "C" PRIMARY KEY,
  deleted_at FLOAT8 NOT NULL,
  request TEXT NOT NULL
);
-- How many runs of a batch were deleted, and when the last of these had ended.
ALTER TABLE dovetail.batches
  ADD COLUMN deleted BIGINT NOT NULL DEFAULT 0, ADD COLUMN deleted_end FLOAT8;
-- To free the idempotency key of a run that is deleted.
CREATE INDEX keys_by_made ON dovetail.keys (made);

-- name: schema_4
-- An alias that divides runs between versions: a JSON object of weights by version. `version` is then
-- the one with the largest weight.
ALTER TABLE dovetail.aliases ADD COLUMN weights TEXT;
-- What was done to workflows and rate limits, and by whom. Rows are added and never changed; `kind`
-- is `workflow` or `limit`, `name` is that of the workflow or the tag.
CREATE TABLE dovetail.history (
  number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  kind TEXT NOT NULL,
  name BYTEA NOT NULL,
  time FLOAT8 NOT NULL,
  actor TEXT NOT NULL,
  action TEXT NOT NULL,
  details JSON NOT NULL
);
CREATE INDEX history_by_name ON dovetail.history (kind, name, number);

-- name: schema_5
-- For views. What users and handlers wrote is bytes; a character U+0000, which jsonb refuses, is shown
-- as U+FFFD.
CREATE OR REPLACE FUNCTION dovetail.json_of(content BYTEA) RETURNS JSONB
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT CASE
    WHEN position('\u0000' IN convert_from(content, 'UTF8')) = 0
      THEN convert_from(content, 'UTF8')::JSONB
    ELSE regexp_replace(
      convert_from(content, 'UTF8'), '(?<!\\)((?:\\\\)*)\\u0000', '\1\\ufffd', 'g'
    )::JSONB
  END
$$;
-- The ids of the nodes of a definition, in their order.
CREATE OR REPLACE FUNCTION dovetail.node_ids(content BYTEA) RETURNS TEXT[]
LANGUAGE sql IMMUTABLE STRICT PARALLEL SAFE AS $$
  SELECT array_agg(node.value ->> 'id' ORDER BY node.nth)
  FROM jsonb_array_elements(dovetail.json_of(content) -> 'nodes') WITH ORDINALITY
    AS node (value, nth)
$$;

-- name: schema_6
-- Notifications that a receiver has not accepted yet, as the outbox in Redis has them.
CREATE TABLE dovetail.notifications (
  id TEXT COLLATE "C" PRIMARY KEY,
  content BYTEA NOT NULL
);

-- name: views
-- For users: docs/sql.md promises their columns. They are replaced with each version of the schema.
CREATE OR REPLACE VIEW dovetail.v_runs AS
SELECT r.run_id, r.workflow, r.version, r.status, r.epoch,
  dovetail.json_of(r.params) AS params, dovetail.json_of(r.result) AS result,
  dovetail.json_of(r.error) AS error,
  to_timestamp(r.created_at) AS created_at, to_timestamp(r.started_at) AS started_at,
  to_timestamp(r.finished_at) AS finished_at, r.finished_at - r.started_at AS duration,
  b.batch_id, r.place AS batch_index,
  (SELECT CASE WHEN position('\x00'::BYTEA IN k.key) = 0
     THEN convert_from(k.key, 'UTF8') ELSE encode(k.key, 'escape') END
   FROM dovetail.keys k WHERE k.made = r.run_id LIMIT 1) AS idempotency_key,
  dovetail.json_of(r.meta) ->> 'forked_from' AS forked_from
FROM dovetail.runs r LEFT JOIN dovetail.batches b ON b.number = r.batch;
-- A state is its fields between bars (see `codec.node_text`), an end its reason, the index of its cause
-- and its error.
CREATE OR REPLACE VIEW dovetail.v_nodes AS
SELECT found.run_id, found.workflow, found.node, found.handler, found.status,
  COALESCE(state[2]::BIGINT, 1) AS epoch, COALESCE(state[3]::BIGINT, 0) AS attempt,
  CASE WHEN found.status NOT IN ('PENDING', 'QUEUED') THEN NULLIF(state[12], '') END AS worker,
  to_timestamp(NULLIF(state[13], '')::FLOAT8) AS started_at,
  to_timestamp(NULLIF(state[14], '')::FLOAT8) AS finished_at,
  NULLIF(state[14], '')::FLOAT8 - NULLIF(state[13], '')::FLOAT8 AS duration,
  NULLIF(ending ->> 0, '') AS reason,
  CASE WHEN (ending ->> 1)::BIGINT >= 0 THEN nodes -> (ending ->> 1)::INT ->> 'id' END AS cause,
  CASE WHEN found.status <> 'COMPLETED'
    THEN dovetail.json_of(convert_to(NULLIF(ending ->> 2, ''), 'UTF8')) END AS error,
  CASE WHEN found.status = 'COMPLETED' THEN dovetail.json_of(found.output) END AS output
FROM (
  SELECT r.run_id, r.workflow, spec.value ->> 'id' AS node, spec.value ->> 'handler' AS handler,
    CASE split_part(convert_from(n.state, 'UTF8'), '|', 1)
      WHEN 'Q' THEN 'QUEUED' WHEN 'R' THEN 'RUNNING' WHEN 'C' THEN 'COMPLETED'
      WHEN 'F' THEN 'FAILED' WHEN 'S' THEN 'SKIPPED' WHEN 'X' THEN 'CANCELLED' ELSE 'PENDING'
    END AS status,
    string_to_array(convert_from(n.state, 'UTF8'), '|') AS state,
    dovetail.json_of(n.ends) AS ending, n.output, whole.nodes
  FROM dovetail.runs r JOIN dovetail.definitions d ON d.number = r.definition
    CROSS JOIN LATERAL (SELECT dovetail.json_of(d.content) -> 'nodes' AS nodes) whole
    CROSS JOIN LATERAL jsonb_array_elements(whole.nodes) WITH ORDINALITY AS spec (value, nth)
    LEFT JOIN dovetail.nodes n ON n.run = r.number AND n.place = spec.nth - 1
) found;
-- An event is an array of time, type, epoch, the index of its node, attempt and data. The items of a
-- node with `for_each` have places beyond every index: 2^20 for each node. Each generation is shown up
-- to where a later one begins, as `read_events` does.
CREATE OR REPLACE VIEW dovetail.v_events AS
SELECT run_id, workflow, seq, to_timestamp((event ->> 0)::FLOAT8) AS time, event ->> 1 AS type,
  (event ->> 2)::BIGINT AS epoch,
  ids[CASE WHEN place < 1048576 THEN place + 1 ELSE place / 1048576 END] AS node,
  (event ->> 4)::BIGINT AS attempt,
  CASE WHEN place >= 1048576 THEN place % 1048576 END AS item,
  CASE
    WHEN event -> 5 ? 'at' THEN jsonb_build_object('error', (event -> 5 -> 'error')
      || jsonb_build_object('node', ids[(event -> 5 ->> 'at')::INT + 1]))
    WHEN event -> 5 ? 'cause' THEN (event -> 5)
      || jsonb_build_object('cause', ids[(event -> 5 ->> 'cause')::INT + 1])
    ELSE NULLIF(event -> 5, 'null')
  END AS data
FROM (
  SELECT r.run_id, r.workflow, e.seq, one.event, (one.event ->> 3)::BIGINT AS place, named.ids
  FROM dovetail.runs r JOIN dovetail.definitions d ON d.number = r.definition
    CROSS JOIN LATERAL (SELECT dovetail.node_ids(d.content) AS ids) named
    JOIN dovetail.events e ON e.run = r.number
    CROSS JOIN LATERAL (SELECT dovetail.json_of(e.event) AS event) one
  WHERE (e.generation = 1 OR EXISTS (
      SELECT FROM dovetail.generations g WHERE g.run = e.run AND g.generation = e.generation
    ))
    AND NOT EXISTS (
      SELECT FROM dovetail.generations later
      WHERE later.run = e.run AND later.generation > e.generation AND later.first_seq <= e.seq
    )
) shown;
CREATE OR REPLACE VIEW dovetail.v_logs AS
SELECT r.run_id, r.workflow, l.seq + line.nth - 1 AS seq,
  to_timestamp((line.value ->> 0)::FLOAT8) AS time, l.node, l.epoch, l.attempt, l.item,
  line.value ->> 1 AS level, line.value ->> 2 AS logger, line.value ->> 3 AS message,
  line.value -> 4 AS fields
FROM dovetail.runs r JOIN dovetail.logs l ON l.run = r.number
  CROSS JOIN LATERAL jsonb_array_elements(dovetail.json_of(l.content)) WITH ORDINALITY
    AS line (value, nth);

-- ── the schema ──────────────────────────────────────────────────────────────────────────

-- name: has_schema
-- From the catalogue itself: to_regclass may still answer from what it knew before the lock.
SELECT
  EXISTS (SELECT FROM pg_namespace WHERE nspname = 'dovetail'),
  EXISTS (
    SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
    WHERE n.nspname = 'dovetail' AND c.relname = 'schema_version'
  );

-- name: schema_version
SELECT version FROM dovetail.schema_version;

-- name: set_schema_version
UPDATE dovetail.schema_version SET version = $1;

-- name: lock_schema
-- Of several processes one migrates; the others wait and find it done.
SELECT pg_advisory_xact_lock($1);

-- name: ping
SELECT 1;

-- name: is_read_only
SELECT pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on';

-- name: write_something
UPDATE dovetail.schema_version SET version = version;

-- ── runs are accepted ───────────────────────────────────────────────────────────────────

-- name: add_definition
INSERT INTO dovetail.definitions (sha256, content) VALUES ($1, $2) ON CONFLICT DO NOTHING;

-- name: find_definition
SELECT number FROM dovetail.definitions WHERE sha256 = $1;

-- name: add_runs
-- Fewer than given, if the definition is not there, or an id or a place in the batch is taken.
-- `meta` is what a fork was accepted with.
INSERT INTO dovetail.runs (
  workflow, version, definition, retries, batch, created_at, meta, run_id, params, place
)
SELECT $1::TEXT, $2::BIGINT, d.number, $4::BYTEA, $5::BIGINT, $6::FLOAT8, $10::BYTEA,
  new.run_id, new.params, new.place
FROM dovetail.definitions d,
  unnest($7::TEXT[], $8::BYTEA[], $9::BIGINT[]) WITH ORDINALITY
  AS new (run_id, params, place, nth)
WHERE d.sha256 = $3 ORDER BY new.nth
ON CONFLICT DO NOTHING RETURNING run_id;

-- name: find_place
SELECT run_id FROM dovetail.runs WHERE batch = $1 AND place = $2;

-- name: add_key
-- Waits for a transaction that is about to use the key, and adds nothing if it is used.
INSERT INTO dovetail.keys (scope, key, body, made) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING RETURNING made;

-- name: find_key
SELECT body, made FROM dovetail.keys WHERE scope = $1 AND key = $2;

-- name: add_batch
INSERT INTO dovetail.batches (batch_id, workflow, count, created_at) VALUES ($1, $2, $3, $4)
ON CONFLICT DO NOTHING RETURNING number;

-- name: read_batch
SELECT number, batch_id, workflow, count, created_at, deleted, deleted_end FROM dovetail.batches
WHERE batch_id = $1;

-- name: find_batches
SELECT batch_id FROM dovetail.batches WHERE batch_id >= $1 AND batch_id < $2
ORDER BY batch_id LIMIT 5;

-- name: list_batches
SELECT number, batch_id FROM dovetail.batches WHERE number < $1 ORDER BY number DESC LIMIT $2;

-- name: batch_counts
SELECT status, COUNT(*), COUNT(finished_at), MAX(finished_at) FROM dovetail.runs
WHERE batch = $1 GROUP BY status;

-- name: batch_runs
SELECT place, run_id, status FROM dovetail.runs
WHERE batch = $1 AND place >= $2 ORDER BY place LIMIT $3;

-- name: statuses_in_batch
-- Which of these runs are in the batch.
SELECT run_id, status, finished_at FROM dovetail.runs
WHERE batch = $1 AND run_id = ANY ($2::TEXT[]);

-- ── runs are archived ───────────────────────────────────────────────────────────────────

-- name: lock_runs
-- In one order, so that two archivers never wait for each other.
SELECT number, run_id, definition, generation, last_seq, epoch, finished_at FROM dovetail.runs
WHERE run_id = ANY ($1::TEXT[]) ORDER BY run_id FOR NO KEY UPDATE;

-- name: add_events
-- They continue the log, under the lock of their run: no other archiver has written them.
INSERT INTO dovetail.events (run, generation, seq, event)
SELECT log.run, log.generation, log.first_seq + line.nth - 1, convert_to(line.event, 'UTF8')
FROM unnest($1::BIGINT[], $2::BIGINT[], $3::BIGINT[], $4::TEXT[])
    AS log (run, generation, first_seq, events),
  unnest(string_to_array(log.events, E'\n')) WITH ORDINALITY AS line (event, nth);

-- name: add_other_events
-- Of another generation than the stored one: another archiver may have written them before.
INSERT INTO dovetail.events (run, generation, seq, event)
SELECT log.run, log.generation, log.first_seq + line.nth - 1, convert_to(line.event, 'UTF8')
FROM unnest($1::BIGINT[], $2::BIGINT[], $3::BIGINT[], $4::TEXT[])
    AS log (run, generation, first_seq, events),
  unnest(string_to_array(log.events, E'\n')) WITH ORDINALITY AS line (event, nth)
ON CONFLICT DO NOTHING;

-- name: forget_nodes
-- A new generation begins: what the one before it had reached may not have happened.
DELETE FROM dovetail.nodes WHERE run = ANY ($1::BIGINT[]);

-- name: forget_items
-- Items of mapped nodes that a snapshot with all items does not have.
DELETE FROM dovetail.nodes WHERE run = $1 AND place >= $2 AND NOT place = ANY ($3::BIGINT[]);

-- name: forget_unbegun
-- Items that were not begun: from these places on, each up to the items of the next node.
DELETE FROM dovetail.nodes n
USING unnest($2::BIGINT[], $3::BIGINT[]) AS unbegun (first_place, end_place)
WHERE n.run = $1 AND n.place >= unbegun.first_place AND n.place < unbegun.end_place;

-- name: save_nodes
-- One that is the same is not written again.
INSERT INTO dovetail.nodes (run, place, state, output, ends)
SELECT * FROM unnest($1::BIGINT[], $2::BIGINT[], $3::BYTEA[], $4::BYTEA[], $5::BYTEA[])
ON CONFLICT (run, place) DO UPDATE SET
  state = excluded.state, output = excluded.output, ends = excluded.ends
WHERE (nodes.state, nodes.output, nodes.ends)
  IS DISTINCT FROM (excluded.state, excluded.output, excluded.ends);

-- name: project_runs
UPDATE dovetail.runs r SET
  generation = new.generation, last_seq = new.last_seq, status = new.status, epoch = new.epoch,
  started_at = new.started_at, finished_at = new.finished_at, error = new.error,
  result = new.result, meta = new.meta
FROM unnest(
  $1::BIGINT[], $2::BIGINT[], $3::BIGINT[], $4::TEXT[], $5::BIGINT[], $6::FLOAT8[],
  $7::FLOAT8[], $8::BYTEA[], $9::BYTEA[], $10::BYTEA[]
) AS new (
  number, generation, last_seq, status, epoch, started_at, finished_at, error, result, meta
)
WHERE r.number = new.number;

-- name: begin_generations
-- From its first event on, be it one that came while the run was finished here.
INSERT INTO dovetail.generations (run, generation, first_seq)
SELECT new.run, new.generation, LEAST(
  new.first_seq,
  (SELECT MIN(e.seq) FROM dovetail.events e
   WHERE e.run = new.run AND e.generation = new.generation)
)
FROM unnest($1::BIGINT[], $2::BIGINT[], $3::BIGINT[]) AS new (run, generation, first_seq)
ON CONFLICT DO NOTHING;

-- name: kept
SELECT run_id, generation, last_seq, finished_at IS NOT NULL FROM dovetail.runs
WHERE run_id = ANY ($1::TEXT[]);

-- name: heads
-- The last event is of the newest generation that has it: a new one may begin after it.
SELECT r.run_id, r.generation, r.last_seq, r.finished_at IS NOT NULL, r.epoch,
  (SELECT e.event FROM (
     SELECT 1 AS generation
     UNION ALL SELECT g.generation FROM dovetail.generations g WHERE g.run = r.number
   ) g JOIN dovetail.events e
     ON e.run = r.number AND e.generation = g.generation AND e.seq = r.last_seq
   ORDER BY g.generation DESC LIMIT 1)
FROM dovetail.runs r WHERE r.run_id = ANY ($1::TEXT[]);

-- name: unfinished
-- Oldest first, after a run that was listed before.
SELECT run_id FROM dovetail.runs
WHERE finished_at IS NULL AND created_at < $1
  AND number > COALESCE((SELECT number FROM dovetail.runs WHERE run_id = $2), 0)
ORDER BY number LIMIT $3;

-- ── what handlers log ───────────────────────────────────────────────────────────────────

-- name: log_heads
-- Where the logs of these runs end, and the last chunk of each.
SELECT r.run_id, r.log_seq, l.seq, l.node, l.epoch, l.attempt, l.item, l.number
FROM dovetail.runs r LEFT JOIN LATERAL (
  SELECT * FROM dovetail.logs WHERE run = r.number ORDER BY seq DESC LIMIT 1
) l ON TRUE
WHERE r.run_id = ANY ($1::TEXT[]);

-- name: add_logs
-- Each once: another archiver may have written them before.
INSERT INTO dovetail.logs (run, seq, node, epoch, attempt, item, number, lines, content)
SELECT * FROM unnest(
  $1::BIGINT[], $2::BIGINT[], $3::TEXT[], $4::BIGINT[], $5::BIGINT[], $6::BIGINT[], $7::BIGINT[],
  $8::BIGINT[], $9::BYTEA[]
)
ON CONFLICT DO NOTHING;

-- name: drop_logs
DELETE FROM dovetail.logs WHERE run = $1 AND node = $2 AND epoch = $3 AND attempt = $4
  AND COALESCE(item, -1) = COALESCE($5::BIGINT, -1) AND number = ANY ($6::BIGINT[]);

-- name: note_missing
-- An attempt lacks $7 lines by now. Those that are noted nowhere are missing before its first chunk
-- from number $6 on.
UPDATE dovetail.logs SET
  missing_lines = logs.missing_lines + GREATEST(0, $7 - noted.missing_lines),
  missing_bytes = logs.missing_bytes + GREATEST(0, $8 - noted.missing_bytes)
FROM (
  SELECT SUM(missing_lines)::BIGINT AS missing_lines, SUM(missing_bytes)::BIGINT AS missing_bytes,
    MIN(number) FILTER (WHERE number >= $6) AS next
  FROM dovetail.logs WHERE run = $1 AND node = $2 AND epoch = $3 AND attempt = $4
    AND COALESCE(item, -1) = COALESCE($5::BIGINT, -1)
) AS noted
WHERE run = $1 AND node = $2 AND epoch = $3 AND attempt = $4
  AND COALESCE(item, -1) = COALESCE($5::BIGINT, -1) AND number = noted.next;

-- name: end_logs
UPDATE dovetail.runs SET log_seq = GREATEST(log_seq, $2::BIGINT),
  log_lost_seq = GREATEST(log_lost_seq, $3::BIGINT),
  log_lost_lines = GREATEST(log_lost_lines, $4::BIGINT),
  log_lost_bytes = GREATEST(log_lost_bytes, $5::BIGINT)
WHERE number = $1;

-- name: log_of_run
SELECT number, log_seq, log_lost_seq, log_lost_lines, log_lost_bytes FROM dovetail.runs
WHERE run_id = $1;

-- name: read_logs
-- From the chunk on that has the line after $2, as many as have so many bytes together.
SELECT seq, node, epoch, attempt, item, number, missing_lines, missing_bytes, content FROM (
  SELECT *, SUM(octet_length(content)) OVER (ORDER BY seq) AS together,
    ROW_NUMBER() OVER (ORDER BY seq) AS nth
  FROM (
    SELECT * FROM dovetail.logs
    WHERE run = $1 AND seq + GREATEST(lines, 1) > $2 + 1 AND seq >= COALESCE(
      (SELECT MAX(seq) FROM dovetail.logs WHERE run = $1 AND seq <= $2 + 1), 0
    ) {conditions} ORDER BY seq LIMIT $4
  ) chunks
) page WHERE together <= $3 OR nth = 1 ORDER BY seq;

-- ── runs are deleted ────────────────────────────────────────────────────────────────────

-- name: ended_runs
-- Behind a number, oldest first, whether they have ended or not: the reader stops at the first run
-- that was created too late.
SELECT number, run_id, created_at, finished_at FROM dovetail.runs
WHERE number > $1 ORDER BY number LIMIT $2;

-- name: ended_by
SELECT run_id FROM dovetail.runs WHERE run_id = ANY ($1::TEXT[]) AND finished_at <= $2;

-- name: lock_finished
-- Runs that are finished in the given epochs, and ended at that time or before.
SELECT r.number, r.run_id, r.batch, r.finished_at FROM dovetail.runs r
JOIN unnest($1::TEXT[], $2::BIGINT[]) AS given (run_id, epoch)
  ON r.run_id = given.run_id AND r.epoch = given.epoch
WHERE r.finished_at <= $3 ORDER BY r.run_id FOR UPDATE OF r;

-- name: remember_deleted
INSERT INTO dovetail.deleted_runs (run_id, deleted_at, request)
SELECT run_id, $2, $3 FROM unnest($1::TEXT[]) AS given (run_id) ON CONFLICT DO NOTHING;

-- name: deleted_by
SELECT run_id FROM dovetail.deleted_runs WHERE run_id = ANY ($1::TEXT[]) AND request = $2;

-- name: find_deleted
SELECT run_id FROM dovetail.deleted_runs WHERE run_id = ANY ($1::TEXT[]);

-- name: forget_deleted
DELETE FROM dovetail.deleted_runs WHERE deleted_at < $1;

-- name: delete_events
DELETE FROM dovetail.events WHERE run = ANY ($1::BIGINT[]);

-- name: delete_nodes
DELETE FROM dovetail.nodes WHERE run = ANY ($1::BIGINT[]);

-- name: delete_generations
DELETE FROM dovetail.generations WHERE run = ANY ($1::BIGINT[]);

-- name: delete_runs
DELETE FROM dovetail.runs WHERE number = ANY ($1::BIGINT[]);

-- name: delete_keys
DELETE FROM dovetail.keys WHERE made = ANY ($1::TEXT[]);

-- name: lock_batches
-- In one order, so that two transactions never wait for each other.
SELECT number FROM dovetail.batches WHERE number = ANY ($1::BIGINT[]) ORDER BY number FOR UPDATE;

-- name: count_deleted
-- One pair of values for each deleted run.
UPDATE dovetail.batches b SET
  deleted = b.deleted + gone.runs, deleted_end = GREATEST(b.deleted_end, gone.last_end)
FROM (
  SELECT batch, COUNT(*) AS runs, MAX(finished_at) AS last_end
  FROM unnest($1::BIGINT[], $2::FLOAT8[]) AS run (batch, finished_at) GROUP BY batch
) gone WHERE b.number = gone.batch;

-- name: delete_emptied_batches
-- All their runs were there once, and none is left.
DELETE FROM dovetail.batches b WHERE b.number = ANY ($1::BIGINT[]) AND b.deleted >= b.count
  AND NOT EXISTS (SELECT FROM dovetail.runs r WHERE r.batch = b.number)
RETURNING b.batch_id;

-- ── runs are read ───────────────────────────────────────────────────────────────────────

-- name: read_run
SELECT r.number, r.workflow, r.version, r.retries, r.params, r.created_at, r.generation,
  r.result, r.log_seq, r.meta, d.sha256, d.content
FROM dovetail.runs r JOIN dovetail.definitions d ON d.number = r.definition
WHERE r.run_id = $1;

-- name: read_nodes
SELECT place, state, output, ends FROM dovetail.nodes WHERE run = $1 ORDER BY place;

-- name: look_at_run
-- Without its log and its result.
SELECT r.number, r.workflow, r.version, r.retries, r.params, r.created_at, r.generation,
  r.last_seq, r.meta, d.sha256, d.content
FROM dovetail.runs r JOIN dovetail.definitions d ON d.number = r.definition
WHERE r.run_id = $1;

-- name: look_at_nodes
-- Outputs of so many bytes each, as many of them as have so many together; of all, their sizes.
-- What is not given is not read from where PostgreSQL keeps large values.
SELECT place, state, ends, size,
  CASE WHEN size <= $2::BIGINT AND together <= $3::BIGINT THEN output END
FROM (
  SELECT place, state, ends, output, octet_length(output) AS size,
    SUM(CASE WHEN octet_length(output) <= $2::BIGINT THEN octet_length(output) END)
      OVER (ORDER BY place) AS together
  FROM dovetail.nodes WHERE run = $1
) nodes ORDER BY place;

-- name: read_outputs
-- Unless the run has left the epoch that they are of.
SELECT n.place, n.output FROM dovetail.nodes n JOIN dovetail.runs r ON r.number = n.run
WHERE n.run = $1 AND r.epoch = $2 AND n.place = ANY ($3::BIGINT[]) AND n.output IS NOT NULL;

-- name: read_events
-- Each generation up to where a later one begins.
SELECT e.seq, e.event FROM (
  SELECT 1 AS generation
  UNION ALL SELECT generation FROM dovetail.generations WHERE run = $1
) g JOIN dovetail.events e ON e.run = $1 AND e.generation = g.generation
WHERE e.seq > $2 AND e.seq < COALESCE(
  (SELECT MIN(later.first_seq) FROM dovetail.generations later
   WHERE later.run = $1 AND later.generation > g.generation),
  9223372036854775807
)
ORDER BY e.seq LIMIT $3;

-- name: read_definitions
SELECT number, content FROM dovetail.definitions WHERE number = ANY ($1::BIGINT[]);

-- name: definition_of_run
SELECT r.number, r.definition, r.retries, d.content FROM dovetail.runs r
JOIN dovetail.definitions d ON d.number = r.definition WHERE r.run_id = $1;

-- name: find_runs
SELECT run_id FROM dovetail.runs WHERE run_id >= $1 AND run_id < $2 ORDER BY run_id LIMIT 5;

-- name: count_runs
SELECT status, COUNT(*) FROM dovetail.runs WHERE TRUE {conditions} GROUP BY status;

-- name: count_new_runs
-- By the interval of their creation. There is no index by time: only the newest $2 runs are read.
SELECT width_bucket(created_at, $1::FLOAT8[]), status, COUNT(*) FROM dovetail.runs
WHERE number > (SELECT MAX(number) FROM dovetail.runs) - $2 AND created_at >= ($1::FLOAT8[])[1] {conditions}
GROUP BY 1, 2;

-- name: statuses_of
SELECT run_id, status, created_at FROM dovetail.runs WHERE run_id = ANY ($1::TEXT[]) {conditions};

-- name: summaries
-- Newest first, before a number; the conditions that are wanted follow it, each on an index. A
-- result of more than $3 bytes is not read, nor are params behind $4 bytes of both.
SELECT number, run_id, workflow, version, status, epoch,
  CASE WHEN COALESCE(weight <= $4::BIGINT, TRUE) THEN params END,
  created_at, started_at, finished_at, error,
  CASE WHEN size <= COALESCE($3::BIGINT, size) AND COALESCE(weight <= $4::BIGINT, TRUE) THEN result END, size
FROM (
  SELECT *, octet_length(result) AS size, SUM(
    octet_length(params) + CASE WHEN octet_length(result) <= $3::BIGINT THEN octet_length(result) ELSE 0 END
  ) OVER (ORDER BY number DESC ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS weight
  FROM (
    SELECT * FROM dovetail.runs WHERE number < $1 {conditions} ORDER BY number DESC LIMIT $2
  ) page
) weighed ORDER BY number DESC;

-- name: summaries_of
-- Of these runs, under the same conditions.
SELECT number, run_id, workflow, version, status, epoch, params, created_at, started_at,
  finished_at, error,
  CASE WHEN octet_length(result) <= COALESCE($3::BIGINT, octet_length(result)) THEN result END,
  octet_length(result)
FROM dovetail.runs WHERE number < $1 AND run_id = ANY ($2::TEXT[]) {conditions};

-- name: summary
SELECT number, run_id, workflow, version, status, epoch, params, created_at, started_at,
  finished_at, error,
  CASE WHEN octet_length(result) <= COALESCE($2::BIGINT, octet_length(result)) THEN result END,
  octet_length(result)
FROM dovetail.runs WHERE run_id = $1;

-- ── registered workflows ────────────────────────────────────────────────────────────────

-- name: claim_name
-- A row to lock, also for a name that is new: it is nothing before it is saved.
INSERT INTO dovetail.workflows (name, latest, created_at, updated_at, deleted)
VALUES ($1, 0, $2, $2, TRUE) ON CONFLICT DO NOTHING;

-- name: lock_workflow
SELECT latest, deleted FROM dovetail.workflows WHERE name = $1 FOR UPDATE;

-- name: read_workflow
SELECT name, latest, created_at, updated_at FROM dovetail.workflows
WHERE name = $1 AND NOT deleted;

-- name: head
-- Its latest version and aliases, and whether it has a version.
SELECT w.latest,
  EXISTS (SELECT FROM dovetail.versions v WHERE v.name = w.name AND v.version = $2),
  ARRAY(SELECT a.alias FROM dovetail.aliases a WHERE a.name = w.name ORDER BY a.alias),
  ARRAY(SELECT a.version FROM dovetail.aliases a WHERE a.name = w.name ORDER BY a.alias),
  ARRAY(SELECT a.weights FROM dovetail.aliases a WHERE a.name = w.name ORDER BY a.alias)
FROM dovetail.workflows w WHERE w.name = $1 AND NOT w.deleted;

-- name: was_registered
SELECT 1 FROM dovetail.workflows WHERE name = $1;

-- name: workflows
SELECT w.name, w.latest, w.created_at, w.updated_at,
  ARRAY(SELECT a.alias FROM dovetail.aliases a WHERE a.name = w.name ORDER BY a.alias),
  ARRAY(SELECT a.version FROM dovetail.aliases a WHERE a.name = w.name ORDER BY a.alias),
  ARRAY(SELECT a.weights FROM dovetail.aliases a WHERE a.name = w.name ORDER BY a.alias)
FROM dovetail.workflows w WHERE NOT w.deleted AND w.name > $1 ORDER BY w.name LIMIT $2;

-- name: save_workflow
UPDATE dovetail.workflows SET latest = $2, updated_at = $3,
  created_at = CASE WHEN deleted THEN $3 ELSE created_at END, deleted = FALSE
WHERE name = $1;

-- name: delete_workflow
UPDATE dovetail.workflows SET deleted = TRUE WHERE name = $1;

-- name: drop_aliases
DELETE FROM dovetail.aliases WHERE name = $1;

-- name: drop_versions
-- Runs keep their definitions; only the name lets go of them.
DELETE FROM dovetail.versions WHERE name = $1;

-- name: drop_version
DELETE FROM dovetail.versions WHERE name = $1 AND version = $2;

-- name: active_runs
-- Of a version, or of all if none is given.
SELECT COUNT(*) FROM dovetail.runs WHERE workflow = $1 AND finished_at IS NULL
  AND version IS NOT NULL AND version = COALESCE($2::BIGINT, version);

-- name: active_run_ids
SELECT run_id FROM dovetail.runs WHERE workflow = $1 AND finished_at IS NULL
  AND version IS NOT NULL AND version = COALESCE($3::BIGINT, version) LIMIT $2;

-- name: add_version
INSERT INTO dovetail.versions (name, version, definition, created_at) VALUES ($1, $2, $3, $4);

-- name: read_version
SELECT v.version, v.definition, v.created_at, d.content FROM dovetail.versions v
JOIN dovetail.definitions d ON d.number = v.definition
WHERE v.name = $1 AND v.version = $2;

-- name: versions
SELECT v.version, d.sha256, v.created_at FROM dovetail.versions v
JOIN dovetail.definitions d ON d.number = v.definition
WHERE v.name = $1 ORDER BY v.version;

-- name: aliases
SELECT alias, version, weights FROM dovetail.aliases WHERE name = $1 ORDER BY alias;

-- name: delete_alias
DELETE FROM dovetail.aliases WHERE name = $1 AND alias = $2;

-- name: set_alias
INSERT INTO dovetail.aliases (name, alias, version, weights) VALUES ($1, $2, $3, $4)
ON CONFLICT (name, alias) DO UPDATE SET version = excluded.version, weights = excluded.weights;

-- ── history ─────────────────────────────────────────────────────────────────────────────

-- name: add_history
INSERT INTO dovetail.history (kind, name, time, actor, action, details)
VALUES ($1, $2, $3, $4, $5, $6);

-- name: history
SELECT number, time, actor, action, details FROM dovetail.history
WHERE kind = $1 AND name = $2 AND number < $3 ORDER BY number DESC LIMIT $4;

-- ── limits ──────────────────────────────────────────────────────────────────────────────

-- name: limits
SELECT tag, rate_per_second, burst FROM dovetail.limits ORDER BY tag;

-- name: lock_limits
-- Of two changes of a limit the later one is the one that holds. A limit that is new has no row to
-- lock.
LOCK TABLE dovetail.limits IN SHARE ROW EXCLUSIVE MODE;

-- name: read_limit
SELECT rate_per_second, burst FROM dovetail.limits WHERE tag = $1;

-- name: set_limit
INSERT INTO dovetail.limits (tag, rate_per_second, burst) VALUES ($1, $2, $3)
ON CONFLICT (tag) DO UPDATE SET
  rate_per_second = excluded.rate_per_second, burst = excluded.burst;

-- ── notifications ───────────────────────────────────────────────────────────────────────

-- name: copy_notification
INSERT INTO dovetail.notifications (id, content) VALUES ($1, $2)
ON CONFLICT (id) DO UPDATE SET content = excluded.content;

-- name: forget_notifications
DELETE FROM dovetail.notifications WHERE id = ANY($1::TEXT[]);

-- name: copied_notifications
SELECT id FROM dovetail.notifications WHERE id > $1 ORDER BY id LIMIT $2;

-- name: read_notifications
SELECT id, content FROM dovetail.notifications WHERE id = ANY($1::TEXT[]);

-- ── the doctor ──────────────────────────────────────────────────────────────────────────

-- name: health
SELECT
  current_setting('server_version_num')::INT AS version,
  current_setting('server_version') AS version_text,
  pg_is_in_recovery() OR current_setting('transaction_read_only') = 'on' AS read_only,
  current_setting('fsync') = 'on' AS fsync,
  current_setting('synchronous_commit') AS synchronous_commit,
  current_setting('max_connections')::INT AS max_connections,
  (SELECT COUNT(*) FROM pg_stat_activity WHERE backend_type = 'client backend') AS connections,
  pg_database_size(current_database()) AS size,
  EXTRACT(EPOCH FROM clock_timestamp())::FLOAT8 AS time;

-- name: count_unfinished
SELECT COUNT(*) FROM dovetail.runs WHERE finished_at IS NULL;
