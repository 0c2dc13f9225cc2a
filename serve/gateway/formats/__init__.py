"""The APIs for agents: parsing of requests, and formats of responses."""
