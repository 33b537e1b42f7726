//! Payloads of server-sent events.

/// The payload of each event in `events`, which are complete: the `data` lines joined. Events without data, such as comments and keep-alive
/// events, are left out.
pub(crate) fn payloads(events: &str) -> impl Iterator<Item = String> + '_ {
    let mut lines = events.lines();
    std::iter::from_fn(move || {
        let mut payload: Option<String> = None;
        for line in lines.by_ref() {
            if line.is_empty() {
                payload = payload.filter(|payload| !payload.is_empty());
                if payload.is_some() {
                    return payload;
                }
            } else if let Some(data) = line.strip_prefix("data:") {
                let data = data.strip_prefix(' ').unwrap_or(data);
                match &mut payload {
                    None => payload = Some(data.to_owned()),
                    Some(payload) => {
                        payload.push('\n');
                        payload.push_str(data);
                    }
                }
            }
        }
        payload.filter(|payload| !payload.is_empty())
    })
}

#[cfg(test)]
mod tests {
    use super::payloads;

    #[test]
    fn payloads_of_several_events() {
        let events = ": ping\n\ndata:\n\ndata: {\"a\":\ndata:1}\r\n\r\nevent: x\ndata: [DONE]\n\n";
        assert_eq!(payloads(events).collect::<Vec<_>>(), ["{\"a\":\n1}", "[DONE]"]);
    }
}
