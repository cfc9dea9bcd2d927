from benchmarks import tenant_shares as ts
from kvmesh.services.conductor.loads.queues import PrefillQueue
for seed in (1,2,3):
    ts.show(f"seed {seed}", ts.simulated(seed, admitted=True))
PrefillQueue.passes = lambda self, tenant: False
for seed in (1,2,3):
    ts.show(f"seed {seed}, before", ts.simulated(seed, admitted=True))
