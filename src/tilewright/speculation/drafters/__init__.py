"""Drafters. All have the interface `runtime.interfaces.Drafter`, and one verification step serves them all."""
