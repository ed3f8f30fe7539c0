"""Workload schema, readers, generators and small real traces with their licences."""
