"""What is seen of a service from outside: its logs, its metrics, its traces.

Everything about runs is made from the events that the stores write. Nothing here is imported by
the library: who only runs workflows needs neither structlog nor Prometheus nor OpenTelemetry.
"""
