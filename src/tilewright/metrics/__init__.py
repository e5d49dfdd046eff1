"""Metrics, each declared once: tables, JSON fields, Prometheus metrics and docs/metrics.md come from the declarations."""
