"""Serving: which shapes to declare for the requests that come."""
