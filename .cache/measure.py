import dataclasses, sys
from collections import defaultdict
from benchmarks.paper_setup import Case, config_of, read
from benchmarks import tenant_shares as ts
from kvmesh.sim.run import run
from kvmesh.services.conductor.settings import Mode
from kvmesh.sim.report.records import DONE
from kvmesh.services.conductor.loads.queues import PrefillQueue
real = PrefillQueue.passes
ts.SIM_PROMPTS.update(greedy=8192, many=1024, modest=8192)
ts.SIM_RATES.update(greedy=2.0, many=0.5, modest=0.1)
for slo in (5.0, 10.0, 30.0):
  for name, passes in (("before", lambda self, tenant: False), ("after", real)):
    PrefillQueue.passes = passes
    config = config_of(read(), Case(prefill=1, decode=1))
    config = dataclasses.replace(config, conductor=dataclasses.replace(config.conductor, slo_ttft_s=slo, admission=dataclasses.replace(config.conductor.admission, mode=Mode.PREDICTED)))
    records=[]
    run(config, ts.requests(config.block_tokens, 1), sink=records.append)
    t=defaultdict(lambda:[0,0,0,0,0.0])
    for r in records:
        x=t[r.tenant]; x[0]+=1; x[1]+= r.outcome!=DONE
        if r.outcome==DONE:
            x[2]+= r.ttft_s<=slo; x[4]=max(x[4], r.ttft_s)
    print(slo, name, {k:(f"of {v[0]}", f"refused {v[1]}", f"within {v[2]}", f"max {v[4]:.1f}s") for k,v in sorted(t.items())})
