// States of fleets that `moongate up` does not have: none, and a large one in trouble.

const nothing = { in_flight: 0, ended: 0, failed: 0, first_tokens: 0, first_token_s: 0, prompt_tokens: 0, cached_tokens: 0, completion_tokens: 0 };

export function fleet(instances, { ready = instances.length > 0 } = {}) {
  return {
    schema_version: 2,
    now: Date.now() / 1000,
    gateway: { release: '0.0.0', policy: 'predictive', uptime_s: 4000, ready, draining: false, generation: 7, queued: 12 },
    totals: nothing,
    index: { blocks: 1_234_567, bytes: 34_567_890 },
    models: instances.length > 0 ? ['large-model'] : [],
    store: null,
    instances,
  };
}

/** Half prefills, half decodes, in four zones of four racks; some are being replaced, and some are ill. */
export function manyEngines(number) {
  return Array.from({ length: number }, (_, at) => {
    const prefill = at % 2 === 0;
    const state = at % 50 === 7 ? 'unhealthy' : at % 25 === 4 ? 'not_ready' : 'serving';
    return {
      id: `inference/large-model-${prefill ? 'prefill' : 'decode'}-${at}@0d9c${at}`,
      url: `http://10.0.${at >> 8}.${at & 255}:8000`,
      role: prefill ? 'prefill' : 'decode',
      source: 'kubernetes',
      place: { zone: `zone-${'abcd'[(at >> 1) % 4]}`, rack: `rack-${(at >> 3) % 16}`, node: `node-${at >> 1}`, nvlink_domain: null },
      workload: { group: 'large-model', role: prefill ? 'prefill' : 'decode', revision: null, image: `lmsysorg/sglang:v${at % 3 === 0 ? '0.5.23' : '0.5.6'}` },
      state,
      reason: state === 'not_ready' ? 'pod is not Ready: containers with unready status: [engine]' : null,
      engine: 'sglang',
      version: at % 3 === 0 ? '0.5.23' : '0.5.6',
      models: ['large-model'],
      handover: state === 'not_ready' ? null : 'sglang',
      uses_store: prefill,
      in_flight: at % 17,
      prompts: { completed: 100, tokens: prefill ? 100_000 : 0, cached_tokens: prefill ? (at * 997) % 100_000 : 0 },
      load: {
        waiting_prompts: at % 5,
        waiting_tokens: 1000 * (at % 5),
        wait_s: 0.1 * (at % 5),
        decode_tokens: 1000,
        reported: { running: at % 17, waiting: at % 3, used_tokens: (at * 7919) % 500_000, capacity_tokens: 500_000 },
      },
    };
  });
}
