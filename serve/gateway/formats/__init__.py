"""The interfaces by which agents talk to a policy: what a request asks, and how its answer is written. Imports no torch."""
