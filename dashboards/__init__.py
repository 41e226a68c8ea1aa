"""Grafana dashboards, built by code."""
