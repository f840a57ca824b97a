"""RDMA: one-sided READs of blocks by the receiver, SEND/RECV for control, over reliable connections (RC)."""
