use proptest::prelude::*;

use crate::exchange::*;

const ALL: [ProxyMessage; 10] = [
    ProxyMessage::RequestHeaders { ends: false },
    ProxyMessage::RequestHeaders { ends: true },
    ProxyMessage::RequestBody { ends: false },
    ProxyMessage::RequestBody { ends: true },
    ProxyMessage::RequestTrailers,
    ProxyMessage::ResponseHeaders { ends: false },
    ProxyMessage::ResponseHeaders { ends: true },
    ProxyMessage::ResponseBody { ends: false },
    ProxyMessage::ResponseBody { ends: true },
    ProxyMessage::ResponseTrailers,
];

/// An exchange after these messages. The route is picked as soon as the request is complete.
fn after(messages: &[ProxyMessage]) -> Exchange {
    let mut exchange = Exchange::default();
    for message in messages {
        exchange.receive(*message).unwrap();
        exchange.route();
    }
    exchange
}

#[test]
fn a_streamed_exchange_goes_from_step_to_step() {
    let mut exchange = Exchange::default();
    let mut next = |message| exchange.receive(message).unwrap();
    assert_eq!(next(ALL[0]), ExchangeStep::BeginRequest { ends: false });
    assert_eq!(next(ALL[2]), ExchangeStep::AddToBody { ends: false });
    assert_eq!(next(ALL[3]), ExchangeStep::AddToBody { ends: true });
    assert_eq!(exchange.route(), Some(AwaitedParts { body: true, trailers: false }));
    let mut next = |message| exchange.receive(message).unwrap();
    assert_eq!(next(ALL[5]), ExchangeStep::BeginResponse { ends: false });
    assert_eq!(next(ALL[7]), ExchangeStep::PassBody { ends: false });
    assert_eq!(next(ALL[8]), ExchangeStep::PassBody { ends: true });
    assert!(exchange.has_ended());
    assert_eq!(exchange.receive(ALL[8]), Ok(ExchangeStep::Ignore));
}

#[test]
fn trailers_end_the_request_and_the_response() {
    let mut exchange = Exchange::default();
    exchange.receive(ALL[0]).unwrap();
    assert_eq!(exchange.receive(ProxyMessage::RequestTrailers), Ok(ExchangeStep::EndBody));
    assert_eq!(exchange.route(), Some(AwaitedParts { body: true, trailers: true }));
    exchange.receive(ALL[5]).unwrap();
    assert_eq!(exchange.receive(ProxyMessage::ResponseTrailers), Ok(ExchangeStep::EndResponse));
    assert!(exchange.has_ended());
}

#[test]
fn parts_out_of_order_or_repeated_are_errors() {
    let of_phase = [
        (&[][..], &ALL[2..]),
        // While the body arrives, and while the request is sent.
        (&ALL[..1], &[ALL[0], ALL[1], ALL[7], ALL[8], ALL[9]]),
        (&[ALL[1]], &[ALL[0], ALL[1], ALL[2], ALL[3], ALL[4], ALL[7], ALL[8], ALL[9]]),
        (&[ALL[1], ALL[5]], &[ALL[0], ALL[1], ALL[2], ALL[3], ALL[4], ALL[5], ALL[6]]),
    ];
    for (before, forbidden) in of_phase {
        for message in ALL {
            let mut exchange = after(before);
            let unchanged = exchange;
            let is_error = exchange.receive(message).is_err();
            assert_eq!(is_error, forbidden.contains(&message), "{message:?} after {before:?}");
            assert!(!is_error || exchange == unchanged);
        }
    }
}

#[test]
fn a_response_before_the_route_ends_the_pick() {
    for before in [&ALL[..1], &[ALL[0], ALL[3]]] {
        let mut exchange = Exchange::default();
        for message in before {
            exchange.receive(*message).unwrap();
        }
        assert_eq!(exchange.receive(ALL[5]), Ok(ExchangeStep::Abandon));
        assert_eq!((exchange.route(), exchange.respond()), (None, false));
        assert_eq!(exchange.receive(ALL[8]), Ok(ExchangeStep::PassUnobserved));
        assert!(exchange.has_ended());
    }
}

#[test]
fn the_picker_may_respond_only_before_the_route() {
    let mut reads = after(&[]);
    assert!(!reads.respond());
    reads.receive(ALL[0]).unwrap();
    assert!(reads.respond() && reads.has_ended() && !reads.respond());
    assert!(!after(&[ALL[1]]).respond());
}

proptest! {
    /// Whatever arrives in whatever order: a request begins once, is routed at most once, and its response begins and ends at most once.
    #[test]
    fn each_part_happens_at_most_once(
        messages in prop::collection::vec((0..ALL.len(), any::<bool>(), any::<bool>()), 0..40),
    ) {
        let mut exchange = Exchange::default();
        let (mut begun, mut complete, mut routed, mut responded, mut response, mut ended) = (0, 0, 0, 0, 0, 0);
        for (message, routes, responds) in messages {
            match exchange.receive(ALL[message]) {
                Ok(ExchangeStep::BeginRequest { ends }) => (begun, complete) = (begun + 1, complete + u32::from(ends)),
                Ok(ExchangeStep::AddToBody { ends }) => complete += u32::from(ends),
                Ok(ExchangeStep::EndBody) => complete += 1,
                Ok(ExchangeStep::BeginResponse { ends }) => (response, ended) = (response + 1, ended + u32::from(ends)),
                Ok(ExchangeStep::PassBody { ends }) => ended += u32::from(ends),
                Ok(ExchangeStep::EndResponse) => ended += 1,
                Ok(ExchangeStep::Abandon | ExchangeStep::PassUnobserved | ExchangeStep::Ignore) | Err(_) => {}
            }
            if routes && exchange.route().is_some() {
                routed += 1;
            }
            if responds && exchange.respond() {
                responded += 1;
            }
            prop_assert!(complete <= begun && routed <= complete && response <= routed && ended <= response);
            prop_assert!(begun <= 1 && complete <= 1 && routed + responded <= 1 && response <= 1 && ended <= 1);
            prop_assert!(ended == 0 || exchange.has_ended());
        }
    }
}
