//! The order of Envoy's messages to an endpoint picker. Whatever arrives in whatever order: a request begins once and gets one route or one
//! response of the picker, its own response begins and ends once, and a message that is rejected changes nothing.

#![no_main]

use libfuzzer_sys::fuzz_target;
use moongate_epp::{Exchange, ExchangeStep, ProxyMessage};

/// What has happened so far.
#[derive(Default)]
struct ExchangeCounts {
    begun: u32,
    complete: u32,
    routed: u32,
    responded: u32,
    started: u32,
    ended: u32,
}

impl ExchangeCounts {
    fn add(&mut self, step: ExchangeStep) {
        match step {
            ExchangeStep::BeginRequest { ends } => {
                self.begun += 1;
                self.complete += u32::from(ends);
            }
            ExchangeStep::AddToBody { ends } => self.complete += u32::from(ends),
            ExchangeStep::EndBody => self.complete += 1,
            ExchangeStep::BeginResponse { ends } => {
                self.started += 1;
                self.ended += u32::from(ends);
            }
            ExchangeStep::PassBody { ends } => self.ended += u32::from(ends),
            ExchangeStep::EndResponse => self.ended += 1,
            ExchangeStep::Abandon | ExchangeStep::PassUnobserved | ExchangeStep::Ignore => {}
        }
    }

    fn check(&self) {
        let Self { begun, complete, routed, responded, started, ended } = *self;
        assert!(
            begun <= 1 && complete <= begun && routed <= complete && started <= routed && ended <= started
        );
        assert!(routed + responded <= 1);
    }
}

// A byte is a message, or something that the picker does.
fuzz_target!(|input: &[u8]| {
    let mut exchange = Exchange::default();
    let mut counts = ExchangeCounts::default();
    for byte in input {
        let ends = byte & 1 == 1;
        let message = match byte >> 1 & 7 {
            0 => ProxyMessage::RequestHeaders { ends },
            1 => ProxyMessage::RequestBody { ends },
            2 => ProxyMessage::RequestTrailers,
            3 => ProxyMessage::ResponseHeaders { ends },
            4 => ProxyMessage::ResponseBody { ends },
            5 => ProxyMessage::ResponseTrailers,
            6 => {
                counts.routed += u32::from(exchange.route().is_some());
                continue;
            }
            _ => {
                counts.responded += u32::from(exchange.respond());
                continue;
            }
        };
        let before = exchange;
        match exchange.receive(message) {
            Ok(step) => counts.add(step),
            Err(_) => assert_eq!(exchange, before),
        }
        counts.check();
        assert!(counts.ended == 0 || exchange.has_ended());
    }
});
