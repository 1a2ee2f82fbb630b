"""Multicast: one copy of a message on the sender's link, however many hosts receive it."""
