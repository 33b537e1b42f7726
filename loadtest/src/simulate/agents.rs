//! A generator of tool and agent traffic: many requests start with one of a few long tool prompts, and agents send the
//! next turn soon, with a tool's result.
//!
//! The defaults resemble the published statistics of Mooncake's tool & agent trace (FAST '25, table 2): 23,608 requests
//! in 59 minutes, 8,596 prompt and 182 output tokens on average, 59 % of the prompt tokens reusable.
//!
//! [`AgentTrafficOptions::coding`] resembles the sessions that aiperf 0.13 generates for agentic coding: a shared prompt
//! of 53 k tokens, 22 turns up to 200 k tokens, 3.4 k new and 500 output tokens per turn, and pauses of seconds between
//! most turns.

use super::workload::{ArrivalMode, NewRequest, SimulatedWorkload, WorkloadBuilder};
use crate::engine::tokens::mix;

const BLOCK_TOKENS: usize = 512;
/// Parameters of the agents. Lengths are log-normal.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AgentTrafficOptions {
    pub requests: usize,
    /// Mean requests per second.
    pub per_second: f64,
    /// Number of tool prompts; the n-th is used in proportion to 1/n.
    pub tools: u32,
    /// Mean tokens of a tool prompt.
    pub tool_tokens: f64,
    /// Standard deviation of the logarithm of a tool prompt's length.
    pub tool_spread: f64,
    /// Mean tokens of a first user message.
    pub first_tokens: f64,
    /// Mean tokens added by a user or a tool in each further turn.
    pub text_tokens: f64,
    /// Standard deviation of the logarithm of messages and responses.
    pub spread: f64,
    /// Mean output tokens per request.
    pub answer_tokens: f64,
    /// Mean turns per agent, if none reached the longest prompt.
    pub turns: f64,
    /// Maximum prompt length in tokens; an agent that reaches it stops.
    pub max_prompt_tokens: f64,
    /// Mean seconds between the end of a response and the next turn.
    pub pause_s: f64,
    /// Share of the turns that a person begins, and the mean seconds before them.
    pub people: HumanPauses,
    /// Seconds per output token that a response takes in addition to the pause; 0 if the pause includes the response.
    pub response_s_per_token: f64,
}

/// Turns that a person begins rather than a tool.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct HumanPauses {
    /// Share of all turns.
    pub share: f64,
    /// Mean seconds before such a turn.
    pub pause_s: f64,
}

impl Default for AgentTrafficOptions {
    fn default() -> Self {
        Self {
            requests: 23_608,
            per_second: 6.67,
            tools: 60,
            tool_tokens: 3_600.0,
            tool_spread: 0.5,
            first_tokens: 3_800.0,
            text_tokens: 1_900.0,
            spread: 1.0,
            answer_tokens: 182.0,
            turns: 1.7,
            max_prompt_tokens: 128_000.0,
            pause_s: 5.0,
            people: HumanPauses::default(),
            response_s_per_token: 0.0,
        }
    }
}

impl AgentTrafficOptions {
    /// Coding agents, of which this many start per second.
    #[must_use]
    pub fn coding(agents_per_second: f64) -> Self {
        let turns = 40.0;
        Self {
            requests: 11_000,
            per_second: turns * agents_per_second,
            tools: 1,
            tool_tokens: 52_736.0,
            tool_spread: 0.0,
            first_tokens: 9_400.0,
            text_tokens: 3_440.0,
            spread: 1.1,
            answer_tokens: 500.0,
            turns,
            max_prompt_tokens: 200_000.0,
            pause_s: 2.0,
            people: HumanPauses { share: 0.15, pause_s: 40.0 },
            response_s_per_token: 1.0 / 60.0,
        }
    }
}

/// Generates the requests. Equal arguments give equal requests.
#[must_use]
pub fn generate_agent_traffic(settings: &AgentTrafficOptions, seed: u64) -> SimulatedWorkload {
    let mut random = fastrand::Rng::with_seed(seed);
    let tools: Vec<f64> = (0..settings.tools.max(1))
        .map(|_| log_normal(&mut random, settings.tool_tokens, settings.tool_spread))
        .collect();
    let popularity: f64 = (1..=tools.len()).map(|rank| 1.0 / rank as f64).sum();
    let mut prompts = WorkloadBuilder::new(BLOCK_TOKENS);
    let mut started_s = 0.0;
    let mut requests = 0;
    let mut agent = 0_u64;
    while requests < settings.requests {
        agent += 1;
        started_s += exponential(&mut random, settings.turns / settings.per_second);
        let tool = sample_zipf(&mut random, popularity, tools.len());
        let mut tokens = tools[tool] + log_normal(&mut random, settings.first_tokens, settings.spread);
        let mut due_s = started_s;
        let mut before = None;
        while requests < settings.requests && tokens < settings.max_prompt_tokens {
            let output_length = log_normal(&mut random, settings.answer_tokens, settings.spread).max(1.0);
            let owners = BlockOwners { tool: tool as u64, agent, request: requests as u64 };
            let block_ids = ids(tokens as usize, tools[tool] as usize, owners);
            before = Some(prompts.push(NewRequest {
                recorded_s: due_s,
                input_tokens: tokens as usize,
                output_tokens: output_length as u32,
                block_ids: &block_ids,
                predecessor: before,
                session: agent,
            }));
            requests += 1;
            if random.f64() * settings.turns >= settings.turns - 1.0 {
                break;
            }
            tokens += output_length + log_normal(&mut random, settings.text_tokens, settings.spread);
            let is_human = settings.people.share > 0.0 && random.f64() < settings.people.share;
            let pause_s = if is_human { settings.people.pause_s } else { settings.pause_s };
            due_s += output_length * settings.response_s_per_token + exponential(&mut random, pause_s);
        }
    }
    prompts.finish(ArrivalMode::Open)
}

/// Who has blocks of a prompt.
#[derive(Debug, Clone, Copy)]
struct BlockOwners {
    tool: u64,
    agent: u64,
    request: u64,
}

/// Ids of a prompt's blocks: those of the tool, those of the agent's conversation, and a unique one for a partial last
/// block.
fn ids(tokens: usize, tool_tokens: usize, owners: BlockOwners) -> Vec<u64> {
    let block = |index: usize| {
        let end = (index + 1) * BLOCK_TOKENS;
        let owner = if end <= tool_tokens {
            mix(1, owners.tool)
        } else if end <= tokens {
            mix(2, owners.agent)
        } else {
            mix(3, owners.request)
        };
        mix(owner, index as u64)
    };
    (0..tokens.div_ceil(BLOCK_TOKENS)).map(block).collect()
}

/// A rank from 0, with probability in proportion to 1/(rank + 1).
fn sample_zipf(random: &mut fastrand::Rng, sum: f64, ranks: usize) -> usize {
    let mut left = random.f64() * sum;
    for rank in 0..ranks {
        left -= 1.0 / (rank + 1) as f64;
        if left <= 0.0 {
            return rank;
        }
    }
    ranks - 1
}

pub(crate) fn exponential(random: &mut fastrand::Rng, mean: f64) -> f64 {
    -(1.0 - random.f64()).ln() * mean
}

pub(crate) fn log_normal(random: &mut fastrand::Rng, mean: f64, spread: f64) -> f64 {
    mean * (spread * standard_normal(random) - spread * spread / 2.0).exp()
}

/// By Box and Muller.
pub(crate) fn standard_normal(random: &mut fastrand::Rng) -> f64 {
    (-2.0 * (1.0 - random.f64()).ln()).sqrt() * (std::f64::consts::TAU * random.f64()).cos()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulate::WorkloadRequest;

    #[test]
    fn the_traffic_resembles_the_published_trace() {
        let workload = generate_agent_traffic(&AgentTrafficOptions::default(), 1);
        let count = workload.requests.len() as f64;
        let input =
            workload.requests.iter().map(|request| f64::from(request.input_tokens)).sum::<f64>() / count;
        let output =
            workload.requests.iter().map(|request| f64::from(request.output_tokens)).sum::<f64>() / count;
        let last = workload.requests.iter().map(|request| request.due_s).fold(0.0, f64::max);
        let summary = format!("{input} in, {output} out, {last} s, hit {}", workload.ideal_hit());
        assert!((8_000.0..9_200.0).contains(&input), "{summary}");
        assert!((170.0..195.0).contains(&output), "{summary}");
        assert!((3_300.0..3_800.0).contains(&last), "{summary}");
        assert!((0.56..0.62).contains(&workload.ideal_hit()), "{summary}");
    }

    #[test]
    fn coding_agents_resemble_generated_sessions() {
        let workload = generate_agent_traffic(&AgentTrafficOptions::coding(0.075), 1);
        let count = workload.requests.len() as f64;
        let mean = |tokens: fn(&WorkloadRequest) -> u32| {
            workload.requests.iter().map(|request| f64::from(tokens(request))).sum::<f64>() / count
        };
        let (input, output) = (mean(|request| request.input_tokens), mean(|request| request.output_tokens));
        let agents = workload.requests.iter().filter(|request| request.predecessor.is_none()).count();
        let summary = format!("{input} in, {output} out, {agents} agents, hit {}", workload.ideal_hit());
        assert!((95_000.0..125_000.0).contains(&input), "{summary}");
        assert!((450.0..550.0).contains(&output), "{summary}");
        assert!((400..600).contains(&agents), "{summary}");
        assert!((0.93..0.98).contains(&workload.ideal_hit()), "{summary}");
    }
}
