import time
from collections import Counter
import tests.conductor.candidates.test_bounds as tb
from tests.conductor.candidates.test_bounds import *
select.FEW, select.DEEP = 0, 10_000
def many(n, first=0):
    seen=Counter()
    for seed in range(first, first+n):
        fleet = Fleet(seed, 12, grouped=seed%4==0)
        for i in range(4):
            seen[compare(fleet, fleet.request(i))]+=1
            fleet.brain.step(fleet.request(100 + i))
            seen["t "+compare(fleet, fleet.request(i, ttft_slo_s=0.2, lane=Lane.INTERACTIVE), by_tenant=True)]+=1
            fleet.brain.now += fleet.rng.choice([0.0, 0.01, 0.2])
    return seen

import collections
total=collections.Counter()
t=time.time()
slow=[]
for first in range(60):
    u=time.time(); total+=many(1, first); 
    if time.time()-u>3: slow.append((first, round(time.time()-u,1)))
    if time.time()-t>75: break
print(first, total, slow, time.time()-t, flush=True)
real=bounds.CostBounds.yielding_s
bounds.CostBounds.yielding_s = property(lambda self: np.zeros(len(self.view.columns)))
t=time.time(); bad=0
for first in range(60):
    try: many(1, first)
    except AssertionError: bad+=1
    if time.time()-t>45: break
print("broken found in", bad, "of", first)
