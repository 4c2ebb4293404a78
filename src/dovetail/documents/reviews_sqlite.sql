-- Reviews and measurements in a file: its tables, and every statement that is run against it.
-- A comment with a name starts a statement; the comment below it says its purpose.

-- name: schema
-- One review for each document; `fields` and `locked` are JSON, paths are relative to the folder.
CREATE TABLE document_reviews (
  document_id TEXT PRIMARY KEY,
  file_path TEXT NOT NULL,
  sha256 TEXT NOT NULL,
  extractor TEXT NOT NULL,
  fields TEXT NOT NULL,
  locked TEXT NOT NULL,
  status TEXT NOT NULL,
  approved_by TEXT,
  corrected_by TEXT,
  confidence REAL NOT NULL,
  parquet_path TEXT NOT NULL,
  json_path TEXT NOT NULL,
  created_at REAL NOT NULL,
  updated_at REAL NOT NULL,
  corrected_at REAL
) WITHOUT ROWID;
-- One row for each run of a document, however often it is delivered.
CREATE TABLE document_measurements (
  document_id TEXT NOT NULL,
  key TEXT NOT NULL,
  status TEXT NOT NULL,
  seconds REAL,
  confidence REAL,
  finished_at REAL NOT NULL,
  PRIMARY KEY (document_id, key)
) WITHOUT ROWID;
CREATE INDEX document_measurements_by_time ON document_measurements (finished_at);

-- name: get
-- One review.
SELECT document_id, file_path, sha256, extractor, fields, locked, status, approved_by,
  corrected_by, confidence, parquet_path, json_path, created_at, updated_at, corrected_at
FROM document_reviews WHERE document_id = ?;

-- name: page
-- A page of reviews; a limit of -1 is none.
SELECT document_id, file_path, sha256, extractor, fields, locked, status, approved_by,
  corrected_by, confidence, parquet_path, json_path, created_at, updated_at, corrected_at
FROM document_reviews
WHERE (?1 IS NULL OR status = ?1) AND document_id > ?2
  AND document_id >= ?3 AND substr(document_id, 1, length(?3)) = ?3
ORDER BY document_id LIMIT ?4;

-- name: counts
-- How many reviews have each status.
SELECT status, count(*) FROM document_reviews GROUP BY status;

-- name: put
-- Inserts or replaces a review.
INSERT INTO document_reviews (document_id, file_path, sha256, extractor, fields, locked, status,
  approved_by, corrected_by, confidence, parquet_path, json_path, created_at, updated_at,
  corrected_at)
VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)
ON CONFLICT (document_id) DO UPDATE SET file_path = excluded.file_path,
  sha256 = excluded.sha256, extractor = excluded.extractor, fields = excluded.fields,
  locked = excluded.locked, status = excluded.status, approved_by = excluded.approved_by,
  corrected_by = excluded.corrected_by, confidence = excluded.confidence,
  parquet_path = excluded.parquet_path, json_path = excluded.json_path,
  created_at = excluded.created_at, updated_at = excluded.updated_at,
  corrected_at = excluded.corrected_at;

-- name: measured
-- The measurement of one run.
SELECT document_id, key, status, seconds, confidence, finished_at FROM document_measurements
WHERE document_id = ? AND key = ?;

-- name: measure
-- Inserts or replaces a measurement.
INSERT INTO document_measurements (document_id, key, status, seconds, confidence, finished_at)
VALUES (?, ?, ?, ?, ?, ?)
ON CONFLICT (document_id, key) DO UPDATE SET status = excluded.status, seconds = excluded.seconds,
  confidence = excluded.confidence, finished_at = excluded.finished_at;

-- name: measurements
-- The measurements of a period.
SELECT document_id, key, status, seconds, confidence, finished_at FROM document_measurements
WHERE finished_at >= ? AND finished_at < ? ORDER BY finished_at, document_id, key;
