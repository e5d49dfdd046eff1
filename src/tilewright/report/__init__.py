"""Offline reports from plain data."""
