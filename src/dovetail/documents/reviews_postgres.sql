-- Reviews and measurements in PostgreSQL: their tables, and every statement run against them.
-- A comment with a name starts a statement; the comment below it says its purpose.
--
-- `owner` is the folder of results. Fields are json, because jsonb refuses U+0000 and rewrites
-- numbers.

-- name: lock
-- Only one process creates the tables.
SELECT pg_advisory_xact_lock($1);

-- name: schema
-- One review for each document of a folder; paths are relative to it.
CREATE TABLE IF NOT EXISTS document_reviews (
  owner TEXT COLLATE "C" NOT NULL,
  document_id TEXT COLLATE "C" NOT NULL,
  file_path TEXT NOT NULL,
  sha256 TEXT NOT NULL,
  extractor TEXT NOT NULL,
  fields JSON NOT NULL,
  locked JSON NOT NULL,
  status TEXT NOT NULL,
  approved_by TEXT,
  corrected_by TEXT,
  confidence FLOAT8 NOT NULL,
  parquet_path TEXT NOT NULL,
  json_path TEXT NOT NULL,
  created_at FLOAT8 NOT NULL,
  updated_at FLOAT8 NOT NULL,
  corrected_at FLOAT8,
  PRIMARY KEY (owner, document_id)
);
-- One row for each run of a document, however often it is delivered.
CREATE TABLE IF NOT EXISTS document_measurements (
  owner TEXT COLLATE "C" NOT NULL,
  document_id TEXT COLLATE "C" NOT NULL,
  key TEXT COLLATE "C" NOT NULL,
  status TEXT NOT NULL,
  seconds FLOAT8,
  confidence FLOAT8,
  finished_at FLOAT8 NOT NULL,
  PRIMARY KEY (owner, document_id, key)
);
CREATE INDEX IF NOT EXISTS document_measurements_by_time
  ON document_measurements (owner, finished_at);

-- name: has_tables
-- Whether the tables exist: reading creates none.
SELECT to_regclass('document_reviews') IS NOT NULL
  AND to_regclass('document_measurements') IS NOT NULL;

-- name: alone
-- Locks this review until the end of the transaction; it need not exist yet.
SELECT pg_advisory_xact_lock(hashtextextended($1 || E'\n' || $2, 0));

-- name: get
-- One review.
SELECT document_id, file_path, sha256, extractor, fields, locked, status, approved_by,
  corrected_by, confidence, parquet_path, json_path, created_at, updated_at, corrected_at
FROM document_reviews WHERE owner = $1 AND document_id = $2;

-- name: page
-- A page of reviews; a limit of null is none.
SELECT document_id, file_path, sha256, extractor, fields, locked, status, approved_by,
  corrected_by, confidence, parquet_path, json_path, created_at, updated_at, corrected_at
FROM document_reviews
WHERE owner = $1 AND ($2::text IS NULL OR status = $2) AND document_id > $3
  AND document_id >= $4 AND starts_with(document_id, $4)
ORDER BY document_id LIMIT $5;

-- name: counts
-- How many reviews have each status.
SELECT status, count(*) FROM document_reviews WHERE owner = $1 GROUP BY status;

-- name: put
-- Inserts or replaces a review.
INSERT INTO document_reviews (owner, document_id, file_path, sha256, extractor, fields, locked,
  status, approved_by, corrected_by, confidence, parquet_path, json_path, created_at, updated_at,
  corrected_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)
ON CONFLICT (owner, document_id) DO UPDATE SET file_path = excluded.file_path,
  sha256 = excluded.sha256, extractor = excluded.extractor, fields = excluded.fields,
  locked = excluded.locked, status = excluded.status, approved_by = excluded.approved_by,
  corrected_by = excluded.corrected_by, confidence = excluded.confidence,
  parquet_path = excluded.parquet_path, json_path = excluded.json_path,
  created_at = excluded.created_at, updated_at = excluded.updated_at,
  corrected_at = excluded.corrected_at;

-- name: measured
-- The measurement of one run.
SELECT document_id, key, status, seconds, confidence, finished_at FROM document_measurements
WHERE owner = $1 AND document_id = $2 AND key = $3;

-- name: measure
-- Inserts or replaces a measurement.
INSERT INTO document_measurements
  (owner, document_id, key, status, seconds, confidence, finished_at)
VALUES ($1, $2, $3, $4, $5, $6, $7)
ON CONFLICT (owner, document_id, key) DO UPDATE SET status = excluded.status,
  seconds = excluded.seconds, confidence = excluded.confidence, finished_at = excluded.finished_at;

-- name: measurements
-- The measurements of a period.
SELECT document_id, key, status, seconds, confidence, finished_at FROM document_measurements
WHERE owner = $1 AND finished_at >= $2 AND finished_at < $3
ORDER BY finished_at, document_id, key;
