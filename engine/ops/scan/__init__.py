"""Layers that carry a state along each document: scans and convolutions that stop at the boundaries of packed documents."""
