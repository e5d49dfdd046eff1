"""Token generation: requests, pages, scheduler, programs, sampling, outputs. Drafters plug in through `interfaces.py`."""
