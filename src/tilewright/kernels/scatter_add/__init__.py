"""Messages that are gathered already, summed for each node: only those slots of its row that count."""
