"""One way to produce tokens: requests, pages, scheduler, programs, sampling, outputs. Drafters plug in by `interfaces.py`."""
