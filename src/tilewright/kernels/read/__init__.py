"""Reading memory and nothing else: what bounds every kernel that streams its weights."""
